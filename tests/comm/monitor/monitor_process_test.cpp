// Ranks that are processes, one of which fails: the others name it in bounded time, also if it
// hosts the store, and end.
#include <algorithm>
#include <deque>
#include <regex>
#include <string>
#include <vector>

#include "support/processes.h"
#include "support/temporary_folder.h"
#include "support/world.h"

#include "support/catch.h"

using namespace std::chrono_literals;
using namespace ddp::testing;

namespace {

constexpr int kSize = 3;
// Milliseconds in which survivors learn of an end and leave, on a busy machine: the groups' timeout
// is longer.
constexpr int kAtMost = 20000;

struct Scene {
  std::string what;
  std::string place;
  int victim;
  std::string backend;
  int timeout_seconds = 50;
  std::string method = "";  // the init_method for `again`

  std::vector<std::string> command() const {
    std::vector<std::string> words{
        MONITORED_WORLD_PROGRAM, what,    place,
        std::to_string(victim),  backend, std::to_string(timeout_seconds)};
    if (!method.empty()) words.push_back(method);
    return words;
  }
};

/// All ranks of a scene, started at once.
class Ranks : public World {
 public:
  explicit Ranks(const Scene& scene, int size = kSize)
      : World(scene.command(), size, 90s), scene_(scene) {
    start_all();
  }

  const Scene& scene() const { return scene_; }

  std::string output_of_survivors() { return output_of_all_but(scene_.victim); }

  std::string output_of_all_but(int victim) {
    std::string output;
    for (int rank = 0; rank < size(); ++rank) {
      if (rank == victim) continue;
      const auto end = this->rank(rank).wait();
      CAPTURE(rank, end.out, end.err);
      CHECK(end.code == 0);
      output += end.out + end.err;
    }
    return output;
  }

 private:
  const Scene scene_;
};

// Runs the scene under ddprun, which signals the survivors to end and gives them a grace period.
std::string output_under_ddprun(const Scene& scene) {
  std::vector<std::string> arguments{"-n", std::to_string(kSize), "--grace", "60", "--"};
  for (const auto& word : scene.command()) arguments.push_back(word);
  const auto options = in_one_stream(within(90s));
  return run(ddprun(arguments), options).out;
}

std::string output_of(const Scene& scene, bool launched) {
  return launched ? output_under_ddprun(scene) : Ranks(scene).output_of_survivors();
}

struct Setting {
  std::string backend;
  int victim;
  bool launched;
};

/// Half of all settings: each two values come together once. A process takes half a second to load
/// LibTorch.
Setting setting() {
  return GENERATE(
      Setting{"gloo", 0, true}, Setting{"gloo", 1, false}, Setting{"shm", 0, false},
      Setting{"shm", 1, true});
}

/// Checks that both survivors' errors match `words` and came within `at_most` ms, and that both
/// survivors ended.
void check_survivors(const std::string& output, const std::string& words, int at_most) {
  CAPTURE(output);
  int said = 0;
  for (const auto& line : lines_of(output)) said += std::regex_search(line, std::regex(words));
  CHECK(said == kSize - 1);
  const auto learned = numbers_after(output, "learned after ");
  const auto left = numbers_after(output, "left after ");
  CHECK(learned.size() == kSize - 1);
  CHECK(left.size() == kSize - 1);
  for (const int time : learned) CHECK(time < at_most);
  for (const int time : left) CHECK(time < kAtMost);
}

/// The text about the victim's end. If the victim hosted the store, a rank may find that it is gone
/// only after the other survivor has left, too.
std::string ended(int victim) {
  return victim == 1 ? "rank 1 of 3 has ended, or left the process group"
                     : "(rank 0|ranks 0, [12]) of 3 (has|have) ended, or left the process group "
                       "\\(rank 0 hosts the store\\)";
}

}  // namespace

TEST_CASE("a rank that is killed is named by all others", "[comm][process][errors]") {
  const auto [backend, victim, launched] = setting();
  CAPTURE(backend, victim, launched);
  check_survivors(
      output_of({"kill", "between", victim, backend}, launched), ended(victim), kAtMost);
}

TEST_CASE("a rank whose program throws is named by all others", "[comm][process][errors]") {
  const auto [backend, victim, launched] = setting();
  CAPTURE(backend, victim, launched);
  check_survivors(
      output_of({"throw", "between", victim, backend}, launched),
      "an exception in the program of rank " + std::to_string(victim) +
          " of 3 ended its part in the training",
      kAtMost);
}

TEST_CASE("a rank that exits without an error is named by all others", "[comm][process][errors]") {
  const std::string backend = GENERATE("gloo", "shm");
  CAPTURE(backend);
  check_survivors(output_of({"exit", "between", 0, backend}, false), ended(0), kAtMost);
}

TEST_CASE("a rank that dies inside main_first is named by all others", "[comm][process][errors]") {
  std::deque<Ranks> worlds;  // at the same time, because their ranks wait and do not compute
  worlds.emplace_back(Scene{"kill", "main_first", 0, "gloo"});
  worlds.emplace_back(Scene{"kill", "main_first", 1, "shm"});
  for (auto& world : worlds) {
    CAPTURE(world.scene().victim);
    const auto output = world.output_of_survivors();
    check_survivors(output, ended(world.scene().victim), kAtMost);
    check_survivors(output, "main_first", kAtMost);
  }
}

TEST_CASE(
    "if the rank that hosts the store is stopped, the others do not wait for ever",
    "[comm][process][errors]") {
  std::deque<Ranks> worlds;  // at the same time, because their ranks wait and do not compute
  for (const char* place : {"forward", "backward"}) {
    worlds.emplace_back(Scene{"stop", place, 0, "gloo", 20});
  }
  for (const char* place : {"backward", "between", "join"}) {
    worlds.emplace_back(Scene{"stop", place, 0, "shm", 20});
  }
  for (auto& world : worlds) {
    CAPTURE(world.scene().backend, world.scene().place);
    const auto output = world.output_of_survivors();
    check_survivors(output, "the store, which rank 0 hosts, has not answered for ", 40000);
    check_survivors(
        output, " ms: the process that hosts it is stopped, or cannot be reached", 40000);
    for (const int time : numbers_after(output, "learned after ")) CHECK(time > 5000);
    CHECK_FALSE(is_gone(world.rank(0).pid()));
  }
}

TEST_CASE("ranks make their group repeatedly at one address", "[comm][process]") {
  const TemporaryFolder folder;
  std::deque<Ranks> worlds;  // at the same time
  worlds.emplace_back(Scene{"again", "none", -1, "gloo", 30, "env://"}, 2);
  worlds.emplace_back(Scene{"again", "forward", 0, "gloo", 30, "file://" + folder.file("meet")}, 2);
  worlds.emplace_back(Scene{"again", "forward", 1, "shm", 30, "tcp://"}, 4);
  for (auto& world : worlds) {
    CAPTURE(world.scene().method);
    world.output_of_all_but(-1);
  }
  CHECK(names_in(folder.path()).empty());
}

TEST_CASE(
    "ranks that continue without a lost rank keep no descriptor or thread of it",
    "[comm][process][errors]") {
  constexpr int kTimes = 6;
  std::deque<Ranks> worlds;  // at the same time
  worlds.emplace_back(Scene{"lose", std::to_string(kTimes), 0, "gloo", 600}, 2);
  worlds.emplace_back(Scene{"lose", std::to_string(kTimes), 2, "shm", 600}, 2);
  for (auto& world : worlds) {
    for (int rank = 0; rank < 2; ++rank) {
      const auto end = world.rank(rank).wait();
      CAPTURE(world.scene().victim, rank, end.out, end.err);
      CHECK(end.code == 0);
      const auto learned = numbers_after(end.out, "learned after ");
      REQUIRE(learned.size() == kTimes);
      for (int time = 0; time < kTimes; ++time) CHECK((time == 3 || learned[time] < kAtMost));
      for (const char* what : {"descriptors ", "threads "}) {
        const auto held = numbers_after(end.out, what);
        REQUIRE(held.size() == kTimes);
        // Resources that belong to no group exist after the first time.
        CHECK(*std::min_element(&held[3], &held[6]) <= std::max(held[1], held[2]));
      }
    }
  }
}
