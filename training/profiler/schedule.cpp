#include "schedule.h"

#include <ddp/internal/check.h>

namespace ddp {
namespace profiling {
namespace {

// A limit that keeps sums and products of a schedule's numbers far from overflow.
constexpr int64_t kMaxSteps = 1'000'000'000'000;

void check_steps(const char* option, int64_t value, int64_t least) {
  DDP_CHECK_VALUE(
      value >= least && value <= kMaxSteps, "Profiler: expected ", option, " of ", least, " to ",
      kMaxSteps, ", got ", value, ". Set ", option, " to a number of ",
      option == std::string("repeat") ? "cycles." : "steps.");
}

bool records(std::optional<ProfilerAction> action) {
  return action == ProfilerAction::Record || action == ProfilerAction::RecordAndSave;
}

}  // namespace

void check_schedule(const ProfilerOptions& options) {
  check_steps("wait", options.wait(), 0);
  check_steps("warmup", options.warmup(), 0);
  check_steps("active", options.active(), 1);
  check_steps("repeat", options.repeat(), 0);
  check_steps("skip_first", options.skip_first(), 0);
}

ProfilerAction action_of_step(const ProfilerOptions& options, int64_t step) {
  if (!options.has_schedule()) return ProfilerAction::Record;
  if (step < options.skip_first()) return ProfilerAction::None;
  step -= options.skip_first();
  if (options.skip_first_wait()) step += options.wait();
  const int64_t cycle = options.wait() + options.warmup() + options.active();
  if (options.repeat() > 0 && step / cycle >= options.repeat()) return ProfilerAction::None;
  const int64_t in_cycle = step % cycle;
  if (in_cycle < options.wait()) return ProfilerAction::None;
  if (in_cycle < options.wait() + options.warmup()) return ProfilerAction::Warmup;
  return in_cycle < cycle - 1 ? ProfilerAction::Record : ProfilerAction::RecordAndSave;
}

Transition transition(ProfilerAction from, std::optional<ProfilerAction> to) {
  Transition work;
  work.start_prepared = from == ProfilerAction::Warmup && !to;
  work.trace_ready =
      from == ProfilerAction::RecordAndSave || (from == ProfilerAction::Record && !to);
  work.stop = work.trace_ready || work.start_prepared;
  const bool begins = from == ProfilerAction::None || from == ProfilerAction::RecordAndSave;
  work.prepare = begins && (to == ProfilerAction::Warmup || records(to));
  work.start = records(to) && (begins || from == ProfilerAction::Warmup);
  return work;
}

const char* name_of(ProfilerAction action) {
  switch (action) {
    case ProfilerAction::None:
      return "NONE";
    case ProfilerAction::Warmup:
      return "WARMUP";
    case ProfilerAction::Record:
      return "RECORD";
    case ProfilerAction::RecordAndSave:
      return "RECORD_AND_SAVE";
  }
  return "";
}

}  // namespace profiling

bool ProfilerOptions::has_schedule() const {
  return wait() != 0 || warmup() != 0 || active() != 1 || repeat() != 0 || skip_first() != 0;
}

}  // namespace ddp
