// Passes that are captured for a graph, over a backend that behaves like NCCL. No stream is really
// captured here: the test sets pretends_to_capture. tests/ddp/cuda_graph_test.cpp captures on a
// GPU.
#include <c10/core/AllocatorConfig.h>
#include <c10/util/env.h>
#include <ddp/reduction_stats.h>

#include "reducer/like_nccl.h"
#include "support/pretended_capture.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

}  // namespace

TEST_CASE("the host does not poll the works of a captured pass", "[ranks][capture]") {
  const bool as_views = GENERATE(false, true);
  RankBarrier barrier(2);
  const auto polls = run_ranks<std::vector<int>>(2, [&](const Rank& self) {
    Trainer trainer(self, ReducerOptions().stats_every(0).gradient_as_bucket_view(as_views));
    for (int step = 0; step < 3; ++step) TORCH_CHECK(trainer.step().empty());
    const auto eager = trainer.backend->latest;
    const int before = eager->polls;
    c10::intrusive_ptr<testing::DeviceWork> captured;
    int during = 0;
    {
      const Capture capture(barrier);
      const auto error = trainer.step();
      TORCH_CHECK(error.empty(), error);
      captured = trainer.backend->latest;
      during = eager->polls;
    }
    TORCH_CHECK(torch::equal(trainer.a.grad(), torch::full({3}, 1.5)), trainer.a.grad());
    for (int step = 0; step < 2; ++step) TORCH_CHECK(trainer.step().empty());
    return std::vector<int>{during - before, eager->polls - before, captured->polls};
  });
  for (const auto& rank : polls) {
    CHECK(rank[0] == 0);  // of the work before, during the capture
    CHECK(rank[1] > 0);   // of the work before, after the capture
    CHECK(rank[2] == 0);  // of the captured work
  }
}

TEST_CASE("a captured pass is not sampled: it has the times of the capture", "[ranks][capture]") {
  RankBarrier barrier(2);
  const auto sampled = run_ranks<std::vector<int64_t>>(2, [&](const Rank& self) {
    Trainer trainer(self, ReducerOptions().stats_every(1));
    for (int step = 0; step < 3; ++step) TORCH_CHECK(trainer.step().empty());
    {
      const Capture capture(barrier);
      TORCH_CHECK(trainer.step().empty());
    }
    TORCH_CHECK(trainer.step().empty());
    std::vector<int64_t> steps;
    for (const auto& step : trainer.reducer.stats().steps) steps.push_back(step.step);
    return steps;
  });
  for (const auto& steps : sampled) CHECK(steps == std::vector<int64_t>{1, 2, 3, 5});
}

TEST_CASE("a capture before the bucket order is final is an error", "[ranks][capture][errors]") {
  const int ran = GENERATE(0, 1, 2, 3);
  CAPTURE(ran);
  RankBarrier barrier(2);
  const auto errors = run_ranks<std::string>(2, [&](const Rank& self) {
    Trainer trainer(self);
    for (int step = 0; step < ran; ++step) TORCH_CHECK(trainer.step().empty());
    std::string error;
    {
      const Capture capture(barrier);
      error = trainer.step();
    }
    for (int step = 0; step < 3; ++step) TORCH_CHECK(trainer.step().empty());  // still usable
    return error;
  });
  for (int rank = 0; rank < 2; ++rank) {
    if (ran >= 2) {
      CHECK(errors[rank] == "");
    } else {
      CHECK_THAT(
          errors[rank], ContainsText("a capture of backward pass " + std::to_string(ran + 1)) &&
                            ContainsText("on rank " + std::to_string(rank) + " of 2") &&
                            ContainsText("Run at least 3 steps"));
    }
  }
}

TEST_CASE("options that need the host in each pass refuse a capture", "[ranks][capture][errors]") {
  const bool unused = GENERATE(false, true);
  const int size = GENERATE(1, 2);
  CAPTURE(unused, size);
  RankBarrier barrier(size);
  const auto errors = run_ranks<std::string>(size, [&](const Rank& self) {
    Trainer trainer(self, ReducerOptions().find_unused_parameters(unused).static_graph(!unused));
    for (int step = 0; step < 3; ++step) TORCH_CHECK(trainer.step().empty());
    const Capture capture(barrier);
    return trainer.step();
  });
  for (const auto& error : errors) {
    if (size == 1) {
      CHECK(error == "");
    } else {
      CHECK_THAT(error, ContainsText("find_unused_parameters, static_graph or a backend other"));
    }
  }
}

TEST_CASE("a problem of a captured pass aborts the group at once", "[ranks][capture][errors]") {
  RankBarrier barrier(2);
  const auto errors_by_rank = run_ranks<std::vector<std::string>>(2, [&](const Rank& self) {
    Trainer trainer(self);
    for (int step = 0; step < 3; ++step) TORCH_CHECK(trainer.step().empty());
    std::vector<std::string> errors;
    {
      const Capture capture(barrier);
      errors.push_back(trainer.step(/*skip_b=*/self.rank == 1));
    }
    for (int step = 0; step < 3; ++step) errors.push_back(trainer.step());
    return errors;
  });
  CHECK(errors_by_rank[0][0] == "");
  CHECK_THAT(
      errors_by_rank[1][0],
      ContainsText("capturing a backward pass") && ContainsText("b: not used in"));
  CHECK_THAT(errors_by_rank[0].back(), ContainsText("b: not used in"));
}

TEST_CASE("memory that NCCL cannot register is not captured", "[ranks][capture][errors]") {
  const bool registers = GENERATE(true, false);
  CAPTURE(registers);
  c10::CachingAllocator::setAllocatorSettings("expandable_segments:True");
  c10::utils::set_env("NCCL_GRAPH_REGISTER", registers ? "1" : "0");
  RankBarrier barrier(2);
  const auto errors = run_ranks<std::string>(2, [&](const Rank& self) {
    Trainer trainer(self);
    for (int step = 0; step < 3; ++step) TORCH_CHECK(trainer.step().empty());
    std::string error;
    {
      const Capture capture(barrier);
      error = trainer.step();
    }
    TORCH_CHECK(trainer.step().empty());  // still usable
    return error;
  });
  c10::CachingAllocator::setAllocatorSettings("expandable_segments:False");
  for (const auto& error : errors) {
    if (registers) {
      CHECK_THAT(
          error, ContainsText("got expandable_segments in PYTORCH_CUDA_ALLOC_CONF") &&
                     ContainsText("NCCL_GRAPH_REGISTER=0"));
    } else {
      CHECK(error == "");
    }
  }
}

}  // namespace ddp
