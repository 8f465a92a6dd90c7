// Averages of weights as a part of an elastic run.
#include <ddp/elastic.h>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <ddp/averaged_model.h>
#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "elastic/sines.h"
#include "elastic/test_coordinator.h"
#include "support/compare.h"
#include "support/nets.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

constexpr int64_t kAveragedSteps = 6;

/// Where rank 1 is lost in the fourth step, if at all.
enum class LostIn { NoStep, BeginOfStep, MiddleOfStep, AfterUpdate };

/// Trains, and averages the weights in each step.
///
/// \return the model's tensors and those of the averages, with their count.
std::vector<at::Tensor> train_averaged(
    const Rank& self, const std::string& coordinator, LostIn lost_in) {
  Elastic run(options_of_thread(
      coordinator, ProcessGroupOptions().backend("gloo").timeout(std::chrono::seconds(20))));
  ElasticNet net;
  DistributedDataParallel model(
      net, DistributedDataParallelOptions().process_group(run.process_group()));
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2).eps(1e-3));
  AveragedModel average(*net, AveragedModelOptions().ema(0.9).warmup(true));
  run.add("model", model).add("optimizer", optimizer).add("average", average);
  const auto fail_at = [&](LostIn place) {
    if (place != lost_in || self.rank != 1 || run.steps() != 3) return;
    throw std::runtime_error("this rank is to be lost");
  };
  run.loop([&] {
    if (run.steps() == kAveragedSteps) return false;
    optimizer.zero_grad();
    const auto phase = static_cast<double>(run.steps() * 3 + run.process_group()->getRank());
    const auto input = torch::cos(torch::arange(12.0F) * 0.7 + phase).view({3, 4});
    model->forward(input).square().mean().backward();
    run.step([&] {
      fail_at(LostIn::BeginOfStep);
      optimizer.step();
      fail_at(LostIn::MiddleOfStep);
      average.update();
      fail_at(LostIn::AfterUpdate);
    });
    return true;
  });
  auto end = state_of(*net);
  for (const auto& item : average.state_dict()) end.push_back(item.value().clone());
  return end;
}

std::vector<std::vector<at::Tensor>> train_averaged(LostIn lost_in) {
  const TestCoordinator coordinator(/*max_ranks=*/3, /*min_ranks=*/3);
  return run_ranks<std::vector<at::Tensor>>(3, [&](const Rank& self) {
    try {
      return train_averaged(self, coordinator.address(), lost_in);
    } catch (const std::runtime_error&) {
      if (self.rank != 1 || lost_in == LostIn::NoStep) throw;
    }
    return train_averaged(self, coordinator.address(), LostIn::NoStep);
  });
}

}  // namespace

TEST_CASE("a rank that is lost within a step leaves no trace in averages", "[ranks][elastic]") {
  const auto lost_in = GENERATE(LostIn::BeginOfStep, LostIn::MiddleOfStep, LostIn::AfterUpdate);
  CAPTURE(static_cast<int>(lost_in));
  static const auto quiet = train_averaged(LostIn::NoStep);
  for (const auto& end : train_averaged(lost_in)) CHECK(all_equal(end, quiet[0]));
  CHECK(quiet[0].back().numel() > 0);
}

}  // namespace ddp
