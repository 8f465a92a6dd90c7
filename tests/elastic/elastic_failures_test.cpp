// Turns that fail though no rank is lost: an error of one rank ends the wait of the others.
#include <ddp/elastic.h>

#include <chrono>
#include <cstdint>
#include <string>

#include <ddp/distributed_data_parallel.h>
#include <ddp/elastic_errors.h>
#include <ddp/zero.h>
#include <torch/torch.h>

#include "elastic/test_coordinator.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

constexpr int64_t kStepsOfAll = 5;

/// Takes steps. Rank 1 fails in the optimizer's step after the second one, so often: its gradients
/// are not averaged.
///
/// \return how many generations there were.
int64_t train_with_failures(const Rank& self, const std::string& coordinator, int64_t times) {
  Elastic run(options_of_thread(
      coordinator, ProcessGroupOptions().backend("gloo").timeout(std::chrono::seconds(20))));
  torch::nn::Linear net(4, 2);
  DistributedDataParallel model(
      net, DistributedDataParallelOptions().process_group(run.process_group()));
  ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(
      model, torch::optim::AdamWOptions(), ZeroOptions().stage(2));
  run.add("model", model).add("optimizer", optimizer);
  run.loop([&] {
    if (run.steps() == kStepsOfAll) return false;
    optimizer.zero_grad();
    const auto compute = [&] { model->forward(torch::ones({3, 4})).sum().backward(); };
    if (self.rank == 1 && run.steps() == 2 && times-- > 0) {
      const auto guard = model->no_sync();
      compute();
    } else {
      compute();
    }
    run.step(optimizer);
    return true;
  });
  return run.generation().number;
}

}  // namespace

TEST_CASE(
    "a turn that fails again and again though no rank is lost ends the job",
    "[ranks][elastic][errors]") {
  const TestCoordinator coordinator(/*max_ranks=*/3, /*min_ranks=*/3);
  const auto errors = errors_of_ranks(3, [&](const Rank& self) {
    train_with_failures(self, coordinator.address(), /*times=*/1000);
  });
  CHECK_THAT(errors, Each(ContainsText("got one after step 2 that failed 5 times")));
  CHECK_THAT(errors, Each(ContainsText("expected an averaged backward pass before a step")));
}

TEST_CASE("a turn that fails a few times is repeated", "[ranks][elastic]") {
  const TestCoordinator coordinator(/*max_ranks=*/3, /*min_ranks=*/3);
  const auto generations = run_ranks<int64_t>(3, [&](const Rank& self) {
    return train_with_failures(self, coordinator.address(), /*times=*/4);
  });
  for (const auto number : generations) CHECK(number == 1 + 4);
}

}  // namespace ddp
