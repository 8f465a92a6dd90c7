// Ranks that are processes, one of which ends or stops. Without a launcher, which would end them.
#include <glob.h>
#include <signal.h>

#include <fstream>
#include <functional>
#include <set>
#include <sstream>
#include <string>

#include "support/processes.h"
#include "support/temporary_folder.h"
#include "support/world.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

// Milliseconds in which the others learn of an end, on a busy machine: half of the timeout.
constexpr int kAtMostMs = 10000;

/// Ranks that connect through a file of their own.
class FailingWorld {
 public:
  /// \param hosts  empty: the library determines that they are on one host.
  FailingWorld(const char* what, int victim, int size, const std::string& hosts = "")
      : world_(
            {FAILING_WORLD_PROGRAM, what, std::to_string(victim), folder_.file("meet"), hosts},
            size) {
    world_.start_all();
  }

  Process& rank(int rank) { return world_.rank(rank); }

  std::string name(int rank) {
    return "rank " + std::to_string(rank) + " (process " + std::to_string(this->rank(rank).pid()) +
           ")";
  }

 private:
  const TemporaryFolder folder_;
  World world_;
};

// Identifies the file that a line of /proc/PID/maps maps.
std::string device_and_inode(const std::string& line) {
  std::istringstream fields(line);
  std::string addresses, permissions, offset, device, inode;
  fields >> addresses >> permissions >> offset >> device >> inode;
  return device + " " + inode;
}

// Counts the mappings of the file in all processes of this machine.
int count_mappings(const std::string& file) {
  glob_t all;
  REQUIRE(glob("/proc/[0-9]*/maps", 0, nullptr, &all) == 0);
  int count = 0;
  for (size_t i = 0; i < all.gl_pathc; ++i) {
    std::ifstream maps(all.gl_pathv[i]);
    for (std::string line; std::getline(maps, line);) count += device_and_inode(line) == file;
  }
  globfree(&all);
  return count;
}

/// The ranks beside `victim`, which was killed, end long before the timeout, and name it.
///
/// \param text  in the output of a rank.
void check_killed(
    FailingWorld& world, int victim, const std::function<std::string(int rank)>& text) {
  for (int rank = 0; rank < 3; ++rank) {
    const auto end = world.rank(rank).wait();
    CAPTURE(victim, rank, end.out, end.err);
    if (rank == victim) {
      CHECK(end.code == -9);
      continue;
    }
    CHECK(end.code == 0);
    CHECK(numbers_after(end.out, "after ").at(0) < kAtMostMs);
    CHECK_THAT(
        end.out, ContainsText(text(rank)) && ContainsText(world.name(victim) + " has ended"));
  }
}

}  // namespace

TEST_CASE("all ranks name a killed rank, long before the timeout", "[shm][process][errors]") {
  const int victim = GENERATE(0, 1);
  FailingWorld world("kill", victim, 3);
  check_killed(world, victim, [](int rank) {
    return "collective number 1 (all_reduce of 1 x Float, SUM) on rank " + std::to_string(rank) +
           ": rank ";
  });
}

TEST_CASE(
    "all ranks name a rank that is killed in the middle of an all-to-all",
    "[shm][process][errors]") {
  FailingWorld world("exchange", 2, 3);
  check_killed(world, 2, [](int) { return "collective number 1 (all_to_all of Float) on rank "; });
}

TEST_CASE(
    "a killed rank fails all hosts, long before the timeout, and is named on its own host",
    "[shm][hosts][process][errors]") {
  const int victim = GENERATE(0, 3);  // the leader of its host, and not
  const std::string hosts = "aabb";
  FailingWorld world("kill", victim, 4, hosts);
  for (int rank = 0; rank < 4; ++rank) {
    const auto end = world.rank(rank).wait();
    CAPTURE(victim, rank, end.out, end.err);
    if (rank == victim) continue;
    CHECK(end.code == 0);
    CHECK(numbers_after(end.out, "after ").at(0) < kAtMostMs);
    if (hosts[static_cast<size_t>(rank)] == hosts[static_cast<size_t>(victim)]) {
      CHECK_THAT(end.out, ContainsText(world.name(victim) + " has ended"));
    }
  }
}

TEST_CASE("a leader that stops does not block its host for ever", "[shm][hosts][process][errors]") {
  FailingWorld world("stop", 0, 3, "aab");
  const auto end = world.rank(1).wait();
  CAPTURE(end.out, end.err);
  CHECK(end.code == 0);
  CHECK_THAT(end.out, ContainsText("timed out after 12000 ms, rank 0 (at 1) did not come"));
}

TEST_CASE("a rank that stops after it has called a collective is named", "[shm][process][errors]") {
  FailingWorld world("pause", 1, 3);
  for (const int rank : {0, 2}) {
    const auto end = world.rank(rank).wait();
    CAPTURE(rank, end.out, end.err);
    CHECK(end.code == 0);
    // The text is from the rank whose timeout passed first; the other rank repeats it.
    CHECK_THAT(
        end.out,
        ContainsText("timed out after 8000 ms, rank 1 (at 2) came and did not do its part"));
  }
}

TEST_CASE("no memory remains after all ranks are killed", "[shm][process][errors]") {
  FailingWorld world("wait", -1, 2);
  std::set<std::string> files;
  for (int rank = 0; rank < 2; ++rank) {
    world.rank(rank).read_until("waiting");
    // The memory has no name in a file system, and is freed with the last process that maps it.
    const auto& out = world.rank(rank).out();
    CAPTURE(out);
    CHECK_THAT(out, ContainsText("/memfd:ddp"));
    for (const auto& line : lines_of(out)) {
      if (line.rfind("shares ", 0) != 0) continue;
      CHECK_THAT(line, ContainsText("/memfd:"));
      files.insert(device_and_inode(line.substr(7)));
    }
  }
  for (const auto& file : files) CHECK(count_mappings(file) > 0);
  for (int rank = 0; rank < 2; ++rank) world.rank(rank).send(SIGKILL);
  for (int rank = 0; rank < 2; ++rank) CHECK(world.rank(rank).wait().code == -SIGKILL);
  for (const auto& file : files) CHECK(count_mappings(file) == 0);
}
