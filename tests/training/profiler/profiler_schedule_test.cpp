// Compares the schedule with Python's, whose states are recorded in fixtures/profiler_schedule.txt.
#include "training/profiler/schedule.h"

#include <fstream>
#include <sstream>
#include <string>

#include <torch/torch.h>

#include "support/catch.h"
#include "support/error_of.h"

namespace ddp::profiling {
namespace {

ProfilerAction action_of(char letter) {
  return static_cast<ProfilerAction>(std::string("NWRS").find(letter));
}

std::string states(const ProfilerOptions& options, size_t steps) {
  std::string letters;
  for (size_t step = 0; step < steps; ++step) {
    letters += "NWRS"[static_cast<size_t>(action_of_step(options, static_cast<int64_t>(step)))];
  }
  return letters;
}

std::ifstream fixture_at(const std::string& heading) {
  std::ifstream file(DDP_FIXTURES "/profiler_schedule.txt");
  std::string line;
  while (std::getline(file, line) && line.rfind(heading, 0) != 0) {
  }
  return file;
}

}  // namespace

TEST_CASE("every step has the state that Python's schedule has", "[pure][profiler]") {
  auto file = fixture_at("schedules:");
  int schedules = 0;
  std::string line;
  while (std::getline(file, line) && line.rfind("transitions:", 0) != 0) {
    int64_t wait, warmup, active, repeat, skip_first, skip_first_wait;
    std::string expected;
    std::istringstream(line) >> wait >> warmup >> active >> repeat >> skip_first >>
        skip_first_wait >> expected;
    const auto options = ProfilerOptions()
                             .wait(wait)
                             .warmup(warmup)
                             .active(active)
                             .repeat(repeat)
                             .skip_first(skip_first)
                             .skip_first_wait(skip_first_wait != 0);
    if (!options.has_schedule()) continue;  // records until it stops
    CAPTURE(line);
    CHECK(states(options, expected.size()) == expected);
    ++schedules;
  }
  CHECK(schedules == 484);
  CHECK(states({}, 5) == "RRRRR");
}

TEST_CASE("the actions between two steps are Python's", "[pure][profiler]") {
  auto file = fixture_at("transitions:");
  int transitions = 0;
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    char from = 0;
    char to = 0;
    words >> from >> to;
    Transition expected;
    for (std::string word; words >> word;) {
      if (word == "prepare_trace") expected.prepare = true;
      if (word == "trace_ready") expected.trace_ready = true;
      if (word == "stop_trace") expected.stop = true;
      // When the profiler stops, a prepared recording begins before it ends.
      if (word == "start_trace") (to == '-' ? expected.start_prepared : expected.start) = true;
    }
    CAPTURE(line);
    CHECK(
        transition(action_of(from), to == '-' ? std::nullopt : std::optional(action_of(to))) ==
        expected);
    ++transitions;
  }
  CHECK(transitions == 16);
}

TEST_CASE("invalid schedules are errors", "[pure][profiler][errors]") {
  const auto error = [](const ProfilerOptions& options) {
    return ddp::testing::error_of<c10::ValueError>([&] { check_schedule(options); });
  };
  CHECK_THAT(error(ProfilerOptions().wait(-1)), ContainsText("wait of 0 to 1000000000000, got -1"));
  CHECK_THAT(
      error(ProfilerOptions().warmup(-2)), ContainsText("warmup of 0") && ContainsText("-2"));
  CHECK_THAT(
      error(ProfilerOptions().active(0)), ContainsText("active of 1") && ContainsText("got 0"));
  CHECK_THAT(
      error(ProfilerOptions().repeat(-1)), ContainsText("Set repeat to a number of cycles."));
  CHECK_THAT(error(ProfilerOptions().skip_first(-1)), ContainsText("skip_first of 0"));
  CHECK_THAT(error(ProfilerOptions().active(int64_t{1} << 60)), ContainsText("active of 1"));
  CHECK(error(ProfilerOptions()).empty());
}

}  // namespace ddp::profiling
