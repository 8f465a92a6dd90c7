#include <ddp/profiler.h>

#include <exception>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/file_io.h>
#include <ddp/internal/text.h>

#include "key_averages.h"
#include "profiler/stacks/stack_lines.h"
#include "recording.h"
#include "schedule.h"
#include "trace_file.h"

namespace ddp {

Profiler::Profiler(const ProfilerOptions& options) : options_(options) {
  profiling::check_schedule(options_);
  start();
}

Profiler::~Profiler() {
  if (!started_) return;
  try {
    stop();
  } catch (const std::exception& error) {
    TORCH_WARN(text_of(error));
  } catch (...) {
    TORCH_WARN("Profiler: on_trace_ready threw what is no std::exception.");
  }
}

void Profiler::step() {
  check_thread("step()");
  step_range_.reset();
  const auto before = std::exchange(action_, profiling::action_of_step(options_, ++step_num_));
  try {
    transit(before, action_);
  } catch (...) {
    begin_step();
    throw;
  }
  begin_step();
}

void Profiler::stop() {
  if (!started_) return;
  check_thread("stop()");
  step_range_.reset();
  started_ = false;
  transit(action_, std::nullopt);
}

void Profiler::start() {
  DDP_CHECK(
      !started_ && !in_on_trace_ready_,
      "Profiler: expected start() after stop(), got it while the profiler runs. Leave it out.");
  thread_ = std::this_thread::get_id();
  action_ = profiling::action_of_step(options_, step_num_);
  transit(ProfilerAction::None, action_);
  started_ = true;
  begin_step();
}

void Profiler::check_thread(const char* call) const {
  DDP_CHECK(
      started_, "Profiler: expected ", call,
      " before stop(), got it after stop(). Call start() to go on.");
  DDP_CHECK(
      !in_on_trace_ready_, "Profiler: expected ", call,
      " from the loop, got it within on_trace_ready. Step and stop the profiler outside.");
  DDP_CHECK(
      thread_ == std::this_thread::get_id(), "Profiler: expected ", call,
      " on the thread that started it, got it on another. LibTorch records by thread: make a "
      "profiler on the thread that trains.");
}

void Profiler::transit(ProfilerAction from, std::optional<ProfilerAction> to) {
  const auto work = profiling::transition(from, to);
  std::exception_ptr error;
  // A cycle that could not begin, because of another recording, has none.
  if (work.start_prepared && recording_) recording_->start();
  if (work.stop && recording_) {
    auto trace = std::exchange(recording_, nullptr)->stop();
    if (work.trace_ready) {
      trace_ = std::move(trace);
      error = exception_of([&] { call_on_trace_ready(); });
    }
  }
  if (work.prepare) {
    recording_ = std::make_unique<profiling::Recording>(profiling::RecordingOptions{
        options_.record_shapes(), options_.profile_memory(), options_.with_stack()});
  }
  if (work.start && recording_) recording_->start();
  if (error) std::rethrow_exception(error);
}

void Profiler::call_on_trace_ready() {
  if (!options_.on_trace_ready()) return;
  struct Flag {
    bool& flag;
    explicit Flag(bool& set) : flag(set) { flag = true; }
    ~Flag() { flag = false; }
  } const within(in_on_trace_ready_);
  options_.on_trace_ready()(*this);
}

void Profiler::begin_step() {
  if (!options_.has_schedule()) return;
  if (!recording_) return;  // does not even build the name
  step_range_ = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
  if (step_range_->isActive()) step_range_->before(ddp::str("ProfilerStep#", step_num_));
}

profiling::Trace& Profiler::trace(const char* call) const {
  DDP_CHECK(
      trace_, "Profiler: expected a recording that ended, for ", call, ", got none in step ",
      step_num_, ", whose action is ", profiling::name_of(action_),
      ". Call it in on_trace_ready, or after stop().");
  return *trace_;
}

void Profiler::export_chrome_trace(const std::string& path) {
  trace("export_chrome_trace").save(path);
}

void Profiler::export_stacks(const std::string& path, const std::string& metric) const {
  const auto& recorded = trace("export_stacks");
  DDP_CHECK(
      recorded.options().with_stack,
      "Profiler: expected with_stack(true) for export_stacks, got a recording without stacks. Set "
      "it in ProfilerOptions.");
  profiling::check_stack_metric(metric);
  profiling::check_trace_path(path, "file of stacks");
  auto events = profiling::function_events(recorded.events());
  profiling::build_tree(events);
  profiling::take_stacks_of_forward(events);
  const auto lines = profiling::stack_lines(events, metric);
  replace_file(path, [&](OutputFile& file) { file.write(lines.data(), lines.size()); });
}

KeyAverages Profiler::key_averages(bool group_by_input_shape) const {
  const auto& recorded = trace("key_averages");
  auto events = profiling::function_events(recorded.events());
  profiling::build_tree(events);
  return profiling::average_by_key(
      events, group_by_input_shape, recorded.options().profile_memory, recorded.device());
}

RecordFunctionGuard::RecordFunctionGuard(const std::string& name)
    : range_(at::RecordScope::USER_SCOPE) {
  if (range_.isActive()) range_.before(name);
}

}  // namespace ddp
