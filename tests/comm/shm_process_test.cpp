// Ranks that are processes, without a launcher that would end them: one dies.
#include <stdlib.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "support/processes.h"

#include "support/catch.h"

using ddp::testing::numbers_after;
using ddp::testing::Process;
using ddp::testing::ProcessOptions;

namespace {

ProcessOptions of_rank(int rank) {
  ProcessOptions options;
  options.environment = {
      "RANK=" + std::to_string(rank), "WORLD_SIZE=2", "LOCAL_RANK=" + std::to_string(rank)};
  return options;
}

}  // namespace

TEST_CASE("a rank that is killed is noticed within a second, and named", "[shm][process][errors]") {
  std::string file = "/tmp/ddp-shm-XXXXXX";
  const int descriptor = mkstemp(file.data());
  REQUIRE(descriptor >= 0);
  close(descriptor);
  unlink(file.c_str());  // the ranks make it

  Process first({WORLD_PROGRAM, "kill", file}, of_rank(0));
  Process second({WORLD_PROGRAM, "kill", file}, of_rank(1));
  const auto killed = second.wait();
  const auto survivor = first.wait();
  unlink(file.c_str());
  CAPTURE(survivor.out, survivor.err, killed.err);
  CHECK(killed.code == -9);
  REQUIRE(survivor.code == 0);
  CHECK(numbers_after(survivor.out, "after ").at(0) < 1000);
  CHECK_THAT(
      survivor.out, ContainsText(
                        "collective number 1 (all_reduce of 1 x Float, SUM) on rank 0: "
                        "rank 1 (process " +
                        std::to_string(second.pid()) + ") has ended"));
}
