// The failure of one group ends the waits of all groups of the job.
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <ddp/internal/group_monitor.h>

#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp::job_monitor_test {
namespace {

using namespace testing;

constexpr double kBound = 15;  // seconds

/// Two by two ranks: tensor parallel groups {0, 1} and {2, 3}, data parallel {0, 2} and {1, 3}.
struct Grid {
  explicit Grid(const Rank& self)
      : tp(split_group(self.rank / 2, 0, self.group)),
        dp(split_group(self.rank % 2, 0, self.group)) {}
  ProcessGroup tp, dp;
};

void sum(const ProcessGroup& group) {
  auto one = torch::ones({4});
  all_reduce(one, c10d::ReduceOp::SUM, group);
  TORCH_CHECK(one.sum().item<float>() == 8, "wrong sum");
}

/// Calls `fail` on rank 3; ranks 0 and 2 wait in dp, rank 1 in tp, where rank 0 does not come.
template <typename Fail>
std::vector<TimedError> waiting_ranks(const Fail& fail) {
  return run_ranks<TimedError>(
      4,
      [&](const Rank& self) {
        Grid grid(self);
        sum(grid.tp);
        sum(grid.dp);
        const auto seen = timed_error_of([&] {
          if (self.rank == 3) fail(grid);
          if (self.rank == 2) sum(grid.tp);
          sum(self.rank == 1 ? grid.tp : grid.dp);
        });
        self.wait_until_others_end();
        return seen;
      },
      kLongTimeout);
}

}  // namespace

TEST_CASE(
    "a rank that fails in one group ends the ranks that wait in others",
    "[comm][ranks][many][errors][monitor]") {
  const bool in_dp = GENERATE(true, false);
  const auto seen = waiting_ranks([&](Grid& grid) {
    const auto monitor = monitor_of(in_dp ? grid.dp : grid.tp);
    monitor->abort_on_error(
        [] { return std::string("loading"); }, [] { TORCH_CHECK(false, "the disk is full"); });
  });
  for (const auto& rank : seen) {
    CHECK_THAT(
        rank.error, ContainsText(
                        "loading failed on rank 3 of 4 (rank 1 of group [" +
                        std::string(in_dp ? "1" : "2") + ", 3]): the disk is full"));
    CHECK(rank.seconds < kBound);
  }
}

TEST_CASE(
    "a forward pass that throws on one rank ends ranks that wait in other groups",
    "[comm][ranks][many][errors][monitor]") {
  const auto seen = run_ranks<TimedError>(
      4,
      [](const Rank& self) {
        Grid grid(self);
        torch::nn::Linear net(2, 2);
        DistributedDataParallel model(net, DistributedDataParallelOptions().process_group(grid.dp));
        const auto seen = timed_error_of([&] {
          // Rank 1 shares dp with rank 3, and rank 0 waits for rank 1 in tp.
          const auto x = torch::ones({1, self.rank == 3 ? 3 : 2});
          model->forward(x).sum().backward();
          if (self.rank == 0) sum(grid.tp);
        });
        self.wait_until_others_end();
        return seen;
      },
      kLongTimeout);
  for (const int rank : {0, 1, 3}) {
    CAPTURE(rank);
    CHECK_THAT(seen[rank].error, ContainsText("mat1 and mat2 shapes cannot be multiplied"));
    CHECK(seen[rank].seconds < kBound);
  }
}

TEST_CASE(
    "a rank that ends while ranks wait for it in another group is named",
    "[comm][ranks][many][errors][monitor]") {
  const auto seen = run_ranks<TimedError>(
      4,
      [](const Rank& self) {
        Grid grid(self);
        sum(grid.tp);
        sum(grid.dp);
        TimedError seen;
        if (self.rank == 3) {
          return seen;
        }
        seen = timed_error_of([&] {
          if (self.rank == 2) sum(grid.tp);
          sum(self.rank == 1 ? grid.tp : grid.dp);
        });
        self.wait_until_others_end();
        return seen;
      },
      kLongTimeout);
  for (const int rank : {0, 1, 2}) {
    CAPTURE(rank);
    CHECK_THAT(seen[rank].error, ContainsText("rank 3 of 4 has ended"));
    CHECK(seen[rank].seconds < 2 * kBound);
  }
}

TEST_CASE(
    "an error that every rank throws leaves the job usable, whatever groups it unwinds",
    "[comm][ranks][many][errors][monitor]") {
  const auto errors = run_ranks<std::string>(4, [](const Rank& self) {
    const auto error = error_of([&] {
      const Grid grid(self);
      new_group({self.rank}, self.group);  // other ranks on each rank
    });
    auto one = torch::ones({1});
    all_reduce(one, c10d::ReduceOp::SUM, self.group);
    TORCH_CHECK(one.item<float>() == 4);
    return error;
  });
  CHECK_THAT(errors, Each(ContainsText("new_group: expected all ranks to call it alike")));
}

TEST_CASE(
    "an error of one group is no reason to stay in another",
    "[comm][ranks][many][errors][monitor]") {
  const auto seen = run_ranks<TimedError>(
      4,
      [](const Rank& self) {
        const auto seen = timed_error_of([&] {
          const Grid grid(self);
          // Ranks 1 and 3 throw alike; ranks 0 and 2 wait for them in tp.
          if (self.rank % 2 == 1) monitor_of(grid.dp)->throw_agreed("both disagree");
          sum(grid.tp);
        });
        self.wait_until_others_end();
        return seen;
      },
      kLongTimeout);
  for (const int rank : {0, 2}) {
    CAPTURE(rank);
    CHECK_THAT(seen[rank].error, ContainsText("an exception in the program of rank"));
    CHECK(seen[rank].seconds < kBound);
  }
}

TEST_CASE("ranks that make groups by different calls throw", "[comm][ranks][errors][monitor]") {
  const auto errors = run_ranks<std::string>(2, [](const Rank& self) {
    return error_of([&] {
      self.rank == 0 ? new_group({0, 1}, self.group) : split_group(0, 0, self.group);
    });
  });
  CHECK_THAT(
      errors[0], ContainsText("new_group: expected all ranks to call it, but rank 1 of 2 calls "
                              "split_group. "));
  CHECK_THAT(
      errors[1], ContainsText("split_group: expected all ranks to call it, but rank 0 of 2 calls "
                              "new_group. "));
}

}  // namespace ddp::job_monitor_test
