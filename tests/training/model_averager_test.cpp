// Local SGD: which ranks average, and in which steps.
#include <ddp/model_averager.h>

#include <memory>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "support/archives.h"
#include "support/nets.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace {

using namespace ddp::testing;

// Returns in which of ten steps two ranks averaged.
std::string steps_of(int64_t period, int64_t warmup) {
  const auto seen = run_ranks<std::string>(2, [&](const Rank& self) {
    ddp::PeriodicModelAverager averager(period, warmup, self.group);
    std::string steps;
    for (int step = 0; step < 10; ++step) {
      const std::vector<at::Tensor> parameters{
          torch::full({2, 3}, static_cast<float>(self.rank)),
          torch::full({2}, 4.0 * self.rank, torch::kDouble)};
      averager.average_parameters(parameters);
      if (torch::equal(parameters[0], torch::full({2, 3}, 0.5)) &&
          torch::equal(parameters[1], torch::full({2}, 2.0, torch::kDouble))) {
        steps += std::to_string(step);
      }
    }
    return steps;
  });
  CHECK(seen[0] == seen[1]);
  return seen[0];
}

}  // namespace

TEST_CASE("parameters are averaged periodically, after a warm-up", "[local_sgd][ranks]") {
  CHECK(steps_of(1, 0) == "0123456789");
  CHECK(steps_of(3, 2) == "258");
  CHECK(steps_of(4, 0) == "048");
}

TEST_CASE(
    "local SGD averages gradients early, parameters late, and ends with equal ranks",
    "[local_sgd][ranks]") {
  const auto weights = run_ranks<std::vector<torch::Tensor>>(2, [](const Rank& self) {
    auto net = make_linear(2);
    ddp::DistributedDataParallel model(
        net, ddp::DistributedDataParallelOptions().process_group(self.group));
    ddp::PostLocalSGDOptimizer optimizer(
        std::make_shared<torch::optim::SGD>(model->parameters(), 0.1),
        std::make_shared<ddp::PeriodicModelAverager>(3, 2, self.group));
    std::vector<torch::Tensor> after;
    for (int step = 0; step < 6; ++step) {
      optimizer.zero_grad();
      std::unique_ptr<ddp::NoSyncGuard> alone;
      if (step >= 2) alone.reset(new ddp::NoSyncGuard(model->no_sync()));
      model->forward(torch::full({1, 2}, 1.0F + static_cast<float>(self.rank))).sum().backward();
      optimizer.step();
      after.push_back(net->weight.detach().clone());
    }
    return after;
  });
  // Averaged gradients in steps 0 and 1, averaged parameters in steps 2 and 5.
  const std::vector<bool> same{true, true, true, false, false, true};
  for (size_t step = 0; step < same.size(); ++step) {
    CAPTURE(step);
    CHECK(torch::equal(weights[0][step], weights[1][step]) == same[step]);
    const auto mean = (weights[0][step] + weights[1][step]) / 2;
    CHECK(torch::allclose(mean, torch::full({1, 2}, 1 - 0.15 * static_cast<double>(step + 1))));
  }
}

TEST_CASE("an averager saves its count", "[local_sgd][ranks]") {
  const auto steps = run_ranks<int64_t>(1, [](const Rank& self) {
    ddp::PeriodicModelAverager averager(3, 0, self.group);
    for (int i = 0; i < 5; ++i) averager.average_parameters(std::vector<at::Tensor>{});
    auto archive = reread(averager);
    ddp::PeriodicModelAverager loaded(3, 0, self.group);
    loaded.load(archive);
    return loaded.step();
  });
  CHECK(steps[0] == 5);
}

TEST_CASE("averagers refuse invalid options", "[local_sgd][errors][ranks]") {
  const auto error = [](const std::function<void(const Rank&)>& body) {
    return errors_of_ranks(1, body)[0];
  };
  CHECK_THAT(
      error([](const Rank& self) { ddp::PeriodicModelAverager(0, 0, self.group); }),
      ContainsText("expected a period of at least 1, got 0"));
  CHECK_THAT(
      error([](const Rank& self) { ddp::PeriodicModelAverager(1, -1, self.group); }),
      ContainsText("warmup_steps to be at least 0, got -1"));
  CHECK_THAT(
      error([](const Rank&) { ddp::PostLocalSGDOptimizer(nullptr, nullptr); }),
      ContainsText("null pointer"));
}
