// Ranks that are processes, without a launcher that would end them: one dies.
#include <stdlib.h>
#include <unistd.h>

#include <deque>
#include <string>
#include <vector>

#include "support/processes.h"

#include "support/catch.h"

using ddp::testing::numbers_after;
using ddp::testing::Process;
using ddp::testing::ProcessOptions;

namespace {

constexpr int kSize = 3;

ProcessOptions of_rank(int rank) {
  ProcessOptions options;
  options.environment = {
      "RANK=" + std::to_string(rank), "WORLD_SIZE=" + std::to_string(kSize),
      "LOCAL_RANK=" + std::to_string(rank)};
  return options;
}

}  // namespace

TEST_CASE(
    "a rank that is killed is noticed within a second, and named by all",
    "[shm][process][errors]") {
  const int victim = GENERATE(0, 1, 2);
  std::string file = "/tmp/ddp-shm-XXXXXX";
  const int descriptor = mkstemp(file.data());
  REQUIRE(descriptor >= 0);
  close(descriptor);
  unlink(file.c_str());  // the ranks make it

  std::deque<Process> ranks;
  for (int rank = 0; rank < kSize; ++rank) {
    ranks.emplace_back(
        std::vector<std::string>{WORLD_PROGRAM, "kill", std::to_string(victim), file},
        of_rank(rank));
  }
  const auto dead = "rank " + std::to_string(victim) + " (process " +
                    std::to_string(ranks[static_cast<size_t>(victim)].pid()) + ") has ended";
  for (int rank = 0; rank < kSize; ++rank) {
    const auto end = ranks[static_cast<size_t>(rank)].wait();
    CAPTURE(victim, rank, end.out, end.err);
    if (rank == victim) {
      CHECK(end.code == -9);
      continue;
    }
    CHECK(end.code == 0);
    CHECK(numbers_after(end.out, "after ").at(0) < 1000);
    CHECK_THAT(
        end.out, ContainsText(
                     "collective number 1 (all_reduce of 1 x Float, SUM) on rank " +
                     std::to_string(rank) + ": rank ") &&
                     ContainsText(dead));
  }
  unlink(file.c_str());
}
