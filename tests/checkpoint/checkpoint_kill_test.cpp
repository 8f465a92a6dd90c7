// A run whose ranks are killed again and again, at any point, and resumed each time, ends with the
// same state as an uninterrupted run. DDP_TEST_KILLS=20 in the environment kills 20 times.
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "support/processes.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

using ddp::testing::Ended;
using ddp::testing::lines_of;
using ddp::testing::names_in;
using ddp::testing::numbers_after;
using ddp::testing::Process;
using ddp::testing::TemporaryFolder;

constexpr int kRanks = 2;

std::vector<std::string> command(const std::string& folder, int steps) {
  return ddp::testing::ddprun(
      {"-n", std::to_string(kRanks), "--", CHECKPOINT_WORLD_PROGRAM, folder,
       std::to_string(steps)});
}

// Returns the lines with the ranks' results, sorted.
std::vector<std::string> results_in(const std::string& output) {
  std::vector<std::string> results;
  for (const auto& line : ddp::testing::sorted_lines(output)) {
    if (line.find("end ") != std::string::npos) results.push_back(line);
  }
  return results;
}

/// Starts the run, kills a rank in the middle of it, and returns the step after which the run
/// began.
int kill_once(const std::string& folder, int steps, std::mt19937& random) {
  const auto draw = [&](int most) { return std::uniform_int_distribution<int>(0, most)(random); };
  Process job(command(folder, steps));
  job.read_until("pid ", kRanks);
  const auto begun = numbers_after(job.out(), "begins after ").front();
  const auto pids = numbers_after(job.out(), "pid ");
  const auto last_seen = begun + draw(9);
  if (last_seen > begun) job.read_until("step " + std::to_string(last_seen) + "\n");
  // Kills at any point of the next steps, and of their background saves.
  usleep(static_cast<useconds_t>(draw(8000)));
  kill(pids[static_cast<size_t>(draw(kRanks - 1))], SIGKILL);
  CHECK(job.wait().code != 0);
  return begun;
}

}  // namespace

TEST_CASE(
    "a run that is killed at any point and resumed ends bit for bit as an uninterrupted one",
    "[checkpoint][process]") {
  const char* const asked = std::getenv("DDP_TEST_KILLS");
  const int kills = asked != nullptr ? std::atoi(asked) : 2;
  const unsigned seed = std::random_device()();
  CAPTURE(seed);
  std::mt19937 random(seed);
  const int steps = 12 * kills + 20;

  const TemporaryFolder whole, killed;
  const auto expected = ddp::testing::run(command(whole.path(), steps));
  INFO(expected.err);
  REQUIRE(results_in(expected.out).size() == kRanks);

  int saves_cut = 0;
  int begun = 0;
  for (int i = 0; i < kills; ++i) {
    CAPTURE(i);
    const int next = kill_once(killed.path(), steps, random);
    CHECK(next >= begun);
    begun = next;
    for (const auto& name : names_in(killed.path())) saves_cut += name.front() == '.' ? 1 : 0;
  }
  const auto resumed = ddp::testing::run(command(killed.path(), steps));
  INFO(resumed.err);
  CHECK(results_in(resumed.out) == results_in(expected.out));
  CHECK(names_in(killed.path()).size() == 2);
  std::cout << kills << " kills, " << saves_cut << " of them in a save\n";
}

TEST_CASE(
    "a rank with a foreign locale resumes, and ends, as the others do", "[checkpoint][process]") {
  const TemporaryFolder whole, saved;
  const auto expected = ddp::testing::run(command(whole.path(), 20));
  INFO(expected.err);
  REQUIRE(results_in(expected.out).size() == kRanks);

  ddp::testing::ProcessOptions foreign;
  foreign.environment = {"DDP_TEST_LOCALE=1"};
  const auto first = ddp::testing::run(command(saved.path(), 12), foreign);
  INFO(first.err);
  REQUIRE(first.code == 0);
  foreign.environment = {"DDP_TEST_LOCALE=0"};
  const auto resumed = ddp::testing::run(command(saved.path(), 20), foreign);
  INFO(resumed.err);
  CHECK(results_in(resumed.out) == results_in(expected.out));
  CHECK(ddp::testing::numbers_after(resumed.out, "begins after ") == std::vector<int>{12, 12});
}
