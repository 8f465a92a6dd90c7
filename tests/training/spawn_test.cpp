// Runs a program that starts its ranks by ddp::spawn.
#include <algorithm>
#include <csignal>
#include <fstream>
#include <string>
#include <vector>

#include "support/processes.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

std::vector<std::string> spawning(const std::string& name) { return {SPAWN_WORLD, name}; }

Ended run_spawning(const std::string& name, const ProcessOptions& options = {}) {
  return run(spawning(name), options);
}

void check_all_gone(const std::string& out, size_t count) {
  const auto pids = numbers_after(out, "pid ");
  CHECK(pids.size() >= count);
  for (const int pid : pids) {
    CAPTURE(pid);
    CHECK(eventually([&] { return is_gone(pid); }));
  }
}

int count_of(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

/// The program and its two ranks, once these have written their numbers.
struct Paused {
  explicit Paused(const std::string& name, int lines = 2) : program(spawning(name)) {
    program.read_until("pid ", lines);
  }
  Ended end_by(int signal) {
    program.send(signal);
    return program.wait();
  }

  Process program;
};

}  // namespace

TEST_CASE("ranks in one program meet, and end without the program's end", "[spawn][process]") {
  const auto ended = run_spawning("sum");
  INFO(ended.out << ended.err);
  CHECK(ended.code == 0);
  const auto lines = lines_of(ended.out);
  for (const char* rank : {"0", "1", "2"}) {
    const auto line =
        std::string("[") + rank + "] rank " + rank + " of 3 sum 6 local " + rank + " threads 2";
    CHECK(std::count(lines.begin(), lines.end(), line) == 1);
  }
  for (const char* once :
       {"from cout before", "from stdio before", "rank is not set", "spawn returned",
        "destructor in the parent", "atexit in the parent"}) {
    CAPTURE(once);
    CHECK(count_of(ended.out, once) == 1);
  }
  CHECK(count_of(ended.out, "in a rank") == 0);
  CHECK(ended.err.empty());
}

TEST_CASE("spawn throws what a rank threw, and ends the others", "[spawn][process][errors]") {
  const auto ended = run_spawning("throws");
  INFO(ended.out << ended.err);
  CHECK(ended.code == 7);
  CHECK_THAT(
      ended.out,
      ContainsText("\nspawn: expected body to return on every rank, got an exception on rank 1 "
                   "(pid ") &&
          ContainsText("): boom on the rank\n"));
  check_all_gone(ended.out, 3);
}

TEST_CASE("spawn throws how a rank ended", "[spawn][process][errors]") {
  const auto [name, text] = GENERATE(
      std::pair<const char*, const char*>("exits", "), which exited with code 3. Look at its"),
      std::pair<const char*, const char*>(
          "is killed", "), which was killed by signal 9 (SIGKILL). Look at its"),
      std::pair<const char*, const char*>(
          "throws a number", "): an exception that is no std::exception\n"));
  const auto ended = run_spawning(name);
  INFO(ended.out << ended.err);
  CHECK(ended.code == 7);
  CHECK_THAT(ended.out, ContainsText("rank 1 (pid ") && ContainsText(text));
  CHECK(ended.err.empty());
}

TEST_CASE("a signal ends the ranks, and then the program", "[spawn][process]") {
  const int signal = GENERATE(SIGINT, SIGTERM, SIGHUP);
  Paused paused("pauses");
  const auto ended = paused.end_by(signal);
  CHECK(ended.code == -signal);
  check_all_gone(ended.out, 2);
}

TEST_CASE("ranks that ignore a signal are killed", "[spawn][process]") {
  Paused paused("ignores");
  const auto ended = paused.end_by(SIGTERM);
  CHECK(ended.code == -SIGTERM);
  check_all_gone(ended.out, 2);
}

TEST_CASE("the program's handler runs once its ranks have ended", "[spawn][process][errors]") {
  Paused paused("handles");
  const auto ended = paused.end_by(SIGTERM);
  INFO(ended.out);
  CHECK(ended.code == 7);
  CHECK_THAT(
      ended.out, ContainsText("handler ran\nspawn: expected body to return on every rank, got "
                              "SIGTERM to this process, by which the ranks have ended\n"
                              "got SIGTERM; passing it on to 2 ranks\n"));
  check_all_gone(ended.out, 2);
}

TEST_CASE("nothing is left of a program that is killed", "[spawn][process]") {
  Paused paused("children", 4);
  paused.program.send(SIGKILL);
  check_all_gone(paused.program.out(), 4);
  CHECK(paused.program.wait().code == -SIGKILL);
}

TEST_CASE("the program's signals, descriptors and children stay its own", "[spawn][process]") {
  const auto ended = run_spawning("rest");
  INFO(ended.out << ended.err);
  CHECK(ended.code == 0);
  CHECK(count_of(ended.out, "] as the parent\n") == 2);
  CHECK(count_of(ended.out, "as before\n") == 1);
  CHECK(count_of(ended.out, "not as") == 0);
}

TEST_CASE("spawn wants a process that can be copied", "[spawn][process][errors]") {
  const auto with_thread = run_spawning("thread");
  CHECK_THAT(
      with_thread.out, ContainsText("spawn: expected a process with one thread, got 2.") &&
                           ContainsText("Call spawn first in main()"));
  CHECK_THAT(
      run_spawning("nested").out,
      ContainsText("spawn: expected a process that is no rank, got a call in a rank"));
  ProcessOptions launched;
  launched.environment = {"RANK=1", "WORLD_SIZE=2"};
  CHECK_THAT(
      run_spawning("rank", launched).out,
      ContainsText("spawn: expected a process that is no rank, got RANK=1 and WORLD_SIZE=2"));
  launched.environment = {"RANK=0", "WORLD_SIZE=1"};
  CHECK_THAT(run_spawning("rank", launched).out, ContainsText("[1] rank 1 of 2 sum 3"));
}

TEST_CASE("spawn's arguments are checked", "[spawn][process][errors]") {
  const auto ended = run_spawning("arguments");
  INFO(ended.out);
  for (const char* text :
       {"spawn: expected nprocs from 1 to 1024, got 0.", "got 1025.", "got an empty one.",
        "SpawnOptions: expected a grace of at least 0 ms, got -1.",
        "SpawnOptions: expected max_restarts of at least 0, got -1.",
        "SpawnOptions: expected omp_threads of at least 1, got 0.",
        "SpawnOptions: expected prefix(true) with log_dir"}) {
    CHECK_THAT(ended.out, ContainsText(text));
  }
}

TEST_CASE("spawn starts all ranks again, and says so", "[spawn][process]") {
  const auto ended = run_spawning("again");
  INFO(ended.out << ended.err);
  CHECK(ended.code == 0);
  CHECK(count_of(ended.out, "of 2 sum 3") == 2);
  CHECK_THAT(
      ended.err, ContainsText("spawn: rank 1 (pid ") && ContainsText("exited with code 1") &&
                     ContainsText("\nrank 1 threw: the first attempt"));
}

TEST_CASE("spawn keeps what ranks write", "[spawn][process]") {
  const TemporaryFolder folder;
  const auto ended = run(
      {"sh", "-c", "cd '" + folder.path() + "' && exec '" SPAWN_WORLD "' logs"}, ProcessOptions());
  INFO(ended.out << ended.err);
  CHECK(ended.code == 0);
  std::ifstream log(folder.path() + "/logs/attempt_0/rank_1.log");
  std::string line;
  std::getline(log, line);
  CHECK_THAT(line, ContainsText("rank 1 of 2 sum 3"));
}
