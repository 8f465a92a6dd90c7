// A run whose ranks are killed again and again, at any point, and resumed each time, ends with the
// same state as an uninterrupted run. DDP_TEST_KILLS=20 in the environment kills 20 times, and
// DDP_TEST_KILLS=10000 at every write of a sharded save.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/processes.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

using namespace ddp::testing;

constexpr int kRanks = 2;

int kills_or(int otherwise) {
  const char* const asked = std::getenv("DDP_TEST_KILLS");
  return asked != nullptr ? std::atoi(asked) : otherwise;
}

std::vector<std::string> command(const std::string& folder, int steps) {
  return ddprun(
      {"-n", std::to_string(kRanks), "--", CHECKPOINT_WORLD_PROGRAM, folder,
       std::to_string(steps)});
}

// Returns the lines with the ranks' results, sorted.
std::vector<std::string> results_in(const std::string& output) {
  std::vector<std::string> results;
  for (const auto& line : sorted_lines(output)) {
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
  const int kills = kills_or(2);
  const unsigned seed = std::random_device()();
  CAPTURE(seed);
  std::mt19937 random(seed);
  const int steps = 12 * kills + 60;  // the kill comes before the last one

  const TemporaryFolder whole, killed;
  const auto expected = run(command(whole.path(), steps));
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
  const auto resumed = run(command(killed.path(), steps));
  INFO(resumed.err);
  CHECK(results_in(resumed.out) == results_in(expected.out));
  CHECK(names_in(killed.path()).size() == 2);
  std::cout << kills << " kills, " << saves_cut << " of them in a save\n";
}

#ifdef KILL_AT_WRITE_LIBRARY
namespace {

/// A call by which a rank changes files in a save.
struct Write {
  int ranks;  // of the job
  int rank;
  int number;  // from 1
};

/// Loads the newest checkpoint on `ranks` ranks, makes a step, and is killed in its save.
Ended save_sharded(const std::string& folder, const Write& last) {
  ProcessOptions options;
  options.environment = {
      std::string("LD_PRELOAD=") + KILL_AT_WRITE_LIBRARY,
      "DDP_TEST_KILL_AT=" + std::to_string(last.rank) + " " + std::to_string(last.number)};
  return run(
      ddprun(
          {"-n", std::to_string(last.ranks), "--", CHECKPOINT_WORLD_PROGRAM, folder, "1",
           "sharded"}),
      options);
}

/// Some of a list, spread over it.
std::vector<Write> some_of(const std::vector<Write>& writes, size_t count, std::mt19937& random) {
  std::vector<Write> some;
  count = std::min(count, writes.size());
  for (size_t i = 0; i < count; ++i) {
    const auto first = writes.size() * i / count, end = writes.size() * (i + 1) / count;
    some.push_back(writes[first + random() % (end - first)]);
  }
  return some;
}

/// The line that begins with `what`, without it: a step and the hash of its state.
std::string line_after(const std::string& what, const Ended& ended) {
  for (const auto& line : lines_of(ended.out)) {
    const auto at = line.find(what);
    if (at != std::string::npos) return line.substr(at + what.size());
  }
  return "";
}

}  // namespace

TEST_CASE(
    "a sharded save that is killed at a write leaves a checkpoint that other ranks load to the bit",
    "[checkpoint][process]") {
  const TemporaryFolder folder;
  // Rank 0 waits for the others, writes the manifest, gives the checkpoint its name and removes the
  // one before.
  constexpr int kLastWrites = 20;
  std::vector<Write> writes, ends;
  std::string before, last;  // steps and hashes: of the last whole checkpoint, and of the save
  for (const int ranks : {3, 2, 3}) {
    const auto ended = save_sharded(folder.path(), {ranks, 0, 0});
    INFO(ended.out + ended.err);
    REQUIRE(ended.code == 0);
    CHECK(line_after("loaded ", ended) == before);
    before = line_after("saves ", ended);
    REQUIRE(!before.empty());
    if (before[0] == '1') continue;  // the first save removes no checkpoint
    for (int rank = 0; rank < ranks; ++rank) {
      const auto counts =
          numbers_after(ended.err, "rank " + std::to_string(rank) + " changed files ");
      REQUIRE(counts.size() == 1);
      for (int i = 1; i <= counts[0]; ++i) {
        const bool publishes = rank == 0 && i > counts[0] - kLastWrites;
        (publishes ? ends : writes).push_back({ranks, rank, i});
      }
    }
  }
  const unsigned seed = std::random_device()();
  CAPTURE(seed);
  std::mt19937 random(seed);
  REQUIRE(writes.size() > 100);
  const auto half = static_cast<size_t>(kills_or(6)) / 2;
  auto killed = some_of(writes, half, random);
  for (const auto& write : some_of(ends, half, random)) killed.push_back(write);
  std::shuffle(killed.begin(), killed.end(), random);  // so that the number of ranks changes
  size_t published = 0;
  bool is_first = true;
  last = before;
  for (const auto& write : killed) {
    const auto ended = save_sharded(folder.path(), write);
    CAPTURE(write.ranks, write.rank, write.number);
    INFO(ended.out + ended.err);
    CHECK(ended.code != 0);
    const auto loaded = line_after("loaded ", ended);
    CHECK((loaded == before || loaded == last));
    if (!std::exchange(is_first, false) && loaded == last) ++published;
    before = loaded;
    last = line_after("saves ", ended);
    CHECK(!last.empty());
  }
  const auto resumed = save_sharded(folder.path(), {4, 0, 0});
  CHECK(resumed.code == 0);
  const auto loaded = line_after("loaded ", resumed);
  CHECK((loaded == before || loaded == last));
  CHECK(names_in(folder.path()).size() == 1);
  std::cout << killed.size() << " of " << writes.size() + ends.size() << " writes killed, "
            << published << " of them when the checkpoint was whole\n";
}
#endif

TEST_CASE(
    "a rank with a foreign locale resumes, and ends, as the others do", "[checkpoint][process]") {
  const TemporaryFolder whole, saved;
  const auto expected = run(command(whole.path(), 20));
  INFO(expected.err);
  REQUIRE(results_in(expected.out).size() == kRanks);

  ProcessOptions foreign;
  foreign.environment = {"DDP_TEST_LOCALE=1"};
  const auto first = run(command(saved.path(), 12), foreign);
  INFO(first.err);
  REQUIRE(first.code == 0);
  foreign.environment = {"DDP_TEST_LOCALE=0"};
  const auto resumed = run(command(saved.path(), 20), foreign);
  INFO(resumed.err);
  CHECK(results_in(resumed.out) == results_in(expected.out));
  CHECK(numbers_after(resumed.out, "begins after ") == std::vector<int>{12, 12});
}
