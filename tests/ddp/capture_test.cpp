// What a step tells the other ranks of, or compares with them, is not captured for a graph: a
// replay would repeat what was said. No stream is captured here: the library is told that one is.
#include <string>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "reducer/like_nccl.h"
#include "support/error_of.h"
#include "support/pretended_capture.h"

#include "support/catch.h"

namespace ddp {
namespace {

using testing::Capture;
using testing::error_of;
using testing::Rank;
using testing::RankBarrier;
using testing::run_ranks;

using Options = DistributedDataParallelOptions;
using Model = DistributedDataParallel<torch::nn::Linear>;

void step(Model& model) { model->forward(torch::ones({2, 3})).sum().backward(); }

// What a captured step throws behind three that are not captured, and what the next one throws.
struct Told {
  std::string captured;
  std::string behind;
};

std::vector<Told> told_of(const Options& options, bool joins) {
  RankBarrier barrier(2);
  return run_ranks<Told>(2, [&](const Rank& self) {
    auto own = options;
    own.process_group(testing::group_over(testing::like_nccl(self), self));
    Model model(torch::nn::Linear(3, 1), own);
    for (int i = 0; i < 3; ++i) step(model);
    Told told;
    {
      const Capture capture(barrier);
      told.captured = error_of([&] {
        if (joins) {
          model->join([&] { step(model); });
        } else {
          step(model);
        }
      });
    }
    told.behind = error_of([&] { step(model); });
    return told;
  });
}

}  // namespace

TEST_CASE("a step that the ranks tell each other of is not captured", "[ranks][capture][errors]") {
  const bool joins = GENERATE(false, true);
  CAPTURE(joins);
  const auto told =
      told_of(Options().reduction(joins ? Reduction::Mean : Reduction::SampleWeighted), joins);
  for (int rank = 0; rank < 2; ++rank) {
    CHECK_THAT(
        told[rank].captured,
        ContainsText("expected a graph to be captured where the ranks need not tell each other") &&
            ContainsText(
                "got a join or Reduction::SampleWeighted on rank " + std::to_string(rank)) &&
            ContainsText("Capture without these."));
    CHECK_THAT(told[rank].behind, ContainsText("Capture without these."));
  }
}

TEST_CASE("a step that compares replicas is not captured", "[ranks][capture][errors]") {
  for (const auto& rank : told_of(Options().check_replicas_every(4), false)) {
    CHECK_THAT(
        rank.captured, ContainsText("got one in which check_replicas_every has it") &&
                           ContainsText("call check_replicas()"));
    CHECK_THAT(rank.behind, ContainsText("check_replicas_every has it"));
  }
}

}  // namespace ddp
