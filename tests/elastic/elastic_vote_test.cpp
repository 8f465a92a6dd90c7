// A rank that a vote finds wrong leaves, and a new one gets the state of the others.
#include <ddp/elastic.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "elastic/test_coordinator.h"
#include "support/error_of.h"
#include "support/nets.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace elastic_voting {
namespace {

using namespace testing;

constexpr int64_t kSteps = 8;

enum class Spoils { Nothing, Parameter, State };

struct Job {
  TestCoordinator coordinator;
  int slot = 1;  // that changes a bit after its third step
  Spoils spoils = Spoils::Nothing;
  std::atomic<bool> is_spoilt{false};
};

struct Ended {
  std::vector<at::Tensor> state;
  int64_t generation = 0;
  std::string why;  // the last generation before it ended
};

void flip_lowest_bit(const at::Tensor& tensor) { *static_cast<uint8_t*>(tensor.data_ptr()) ^= 1; }

/// A process of the job, from its start to the end of the training.
Ended train(Job& job) {
  Elastic run(options_of_thread(
      job.coordinator.address(),
      ProcessGroupOptions().backend("gloo").timeout(std::chrono::seconds(20))));
  torch::nn::Linear net(6, 2);
  set_waves(*net, {1.3, 0.2, 0, 0.3});
  DistributedDataParallel model(
      net, DistributedDataParallelOptions()
               .process_group(run.process_group())
               .vote(true)
               .check_replicas_every(1));
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.1));
  model->also_compare({&optimizer});
  run.add("model", model).add("optimizer", optimizer);
  const auto first = [&]() -> torch::optim::AdamParamState& {
    return static_cast<torch::optim::AdamParamState&>(
        *optimizer.state().at(net->weight.unsafeGetTensorImpl()));
  };
  run.loop([&] {
    if (run.steps() == kSteps) return false;
    optimizer.zero_grad();
    const auto slot = run.generation().slot;
    const auto x = torch::sin(torch::arange(18.0F).view({3, 6}) * (slot + 1) + run.steps());
    model->forward(x).square().sum().backward();
    run.step(optimizer);
    const bool is_due = run.steps() == 3 && slot == job.slot && job.spoils != Spoils::Nothing;
    if (is_due && !job.is_spoilt.exchange(true)) {
      flip_lowest_bit(job.spoils == Spoils::State ? first().exp_avg() : net->weight);
    }
    return true;
  });
  return {
      {net->weight.detach(), net->bias.detach(), first().exp_avg(), first().exp_avg_sq()},
      run.generation().number,
      run.generation().why};
}

}  // namespace

TEST_CASE("a rank that a vote finds wrong is replaced from the others", "[ranks][elastic][vote]") {
  Job quiet{{3, 3}};
  const auto expected =
      run_ranks<Ended>(3, [&](const Rank& /*self*/) { return train(quiet); })[0].state;
  const auto spoils = GENERATE(Spoils::Parameter, Spoils::State);
  const int slot = GENERATE(0, 2);  // rank 0 has the store, and would send the state
  CAPTURE(static_cast<int>(spoils), slot);
  Job job{{3, 3}, slot, spoils};
  std::atomic<int> left{0};
  const auto ended = run_ranks<Ended>(3, [&](const Rank& /*self*/) {
    Ended result;
    const auto error = error_of([&] { result = train(job); });
    if (error.empty()) return result;
    ++left;
    const auto text = "By vote wrong: rank " + std::to_string(job.slot) + " (host";
    if (error.find(text) == std::string::npos) throw std::runtime_error(error);
    return train(job);  // as the process that the launcher starts
  });
  CHECK(left == 1);
  for (const auto& rank : ended) {
    CHECK(rank.generation == 2);
    // A process that joins has seen no generation end.
    if (!rank.why.empty()) {
      CHECK_THAT(rank.why, ContainsText("By vote wrong: rank " + std::to_string(slot)));
    }
    REQUIRE(rank.state.size() == expected.size());
    for (size_t i = 0; i < expected.size(); ++i) CHECK(torch::equal(rank.state[i], expected[i]));
  }
}

TEST_CASE("of two ranks a vote ends the elastic job", "[ranks][elastic][vote][errors]") {
  Job job{{2, 2}, 1, Spoils::Parameter};
  const auto errors = errors_of_ranks(2, [&](const Rank& /*self*/) { train(job); });
  CHECK_THAT(errors, Each(ContainsText("any of them may be wrong")));
}

}  // namespace elastic_voting
}  // namespace ddp
