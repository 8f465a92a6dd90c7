// A step that exchanges a status between ranks, or compares replicas, cannot be captured for a
// graph: a replay would send the same values again. No real stream is captured; the tests only
// report one.
#include <string>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <ddp/optim.h>
#include <ddp/zero.h>
#include <torch/torch.h>

#include "reducer/like_nccl.h"
#include "support/error_of.h"
#include "support/pretended_capture.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

using Options = DistributedDataParallelOptions;
using Model = DistributedDataParallel<torch::nn::Linear>;

void step(Model& model) { model->forward(torch::ones({2, 3})).sum().backward(); }

// The errors of a captured step after three others, and of the next step, which is not captured.
struct StepErrors {
  std::string captured;
  std::string after_capture;
};

std::vector<StepErrors> step_errors_of_ranks(const Options& options, bool joins) {
  RankBarrier barrier(2);
  return run_ranks<StepErrors>(2, [&](const Rank& self) {
    auto own = options;
    own.process_group(group_over(testing::like_nccl(self), self));
    Model model(torch::nn::Linear(3, 1), own);
    for (int i = 0; i < 3; ++i) step(model);
    StepErrors errors;
    {
      const Capture capture(barrier);
      errors.captured = error_of([&] {
        if (joins) {
          model->join([&] { step(model); });
        } else {
          step(model);
        }
      });
    }
    errors.after_capture = error_of([&] { step(model); });
    return errors;
  });
}

}  // namespace

TEST_CASE("a step with a status exchange is not captured", "[ranks][capture][errors]") {
  const bool joins = GENERATE(false, true);
  CAPTURE(joins);
  const auto errors = step_errors_of_ranks(
      Options().reduction(joins ? Reduction::Mean : Reduction::SampleWeighted), joins);
  for (int rank = 0; rank < 2; ++rank) {
    CHECK_THAT(
        errors[rank].captured,
        ContainsText("expected a graph to be captured in a step without a status exchange") &&
            ContainsText(
                "got a join or Reduction::SampleWeighted on rank " + std::to_string(rank)) &&
            ContainsText("Capture without these."));
    CHECK_THAT(errors[rank].after_capture, ContainsText("Capture without these."));
  }
}

TEST_CASE("a step that compares replicas is not captured", "[ranks][capture][errors]") {
  const bool votes = GENERATE(false, true);
  CAPTURE(votes);
  // With vote(true) in each 50th pass, and in no captured one.
  const auto options = votes ? Options().vote(true) : Options().check_replicas_every(4);
  for (const auto& rank : step_errors_of_ranks(options, false)) {
    CHECK_THAT(
        rank.captured, ContainsText("got one of a model with check_replicas_every or vote") &&
                           ContainsText("call check_replicas()"));
    CHECK_THAT(rank.after_capture, ContainsText("check_replicas_every or vote"));
  }
  for (const auto& rank : step_errors_of_ranks(Options().replay_every(50), false)) {
    CHECK_THAT(rank.captured, ContainsText("got one of a model with replay_every"));
  }
}

TEST_CASE("a step on the host is not captured", "[ranks][capture][errors][offload]") {
  const auto errors = run_ranks<std::string>(1, [](const Rank& self) {
    Model model(torch::nn::Linear(3, 1), Options().process_group(self.group));
    ZeroRedundancyOptimizer<optim::AdamW> optimizer(
        model, torch::optim::AdamWOptions(), ZeroOptions().offload_file("/tmp/ddp-state"));
    step(model);
    RankBarrier barrier(1);
    const Capture capture(barrier);
    return error_of<c10::Error>([&] { optimizer.step(); });
  });
  CHECK_THAT(errors[0], ContainsText("expected no capture of a step with offload"));
}

}  // namespace ddp
