#pragma once

#include <ddp/export.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <ATen/record_function.h>
#include <c10/core/DeviceType.h>
#include <torch/arg.h>

namespace ddp {

class Profiler;

namespace profiling {
class Recording;
class Trace;
}  // namespace profiling

/// Which steps are recorded. As in Python's `torch.profiler.schedule`: `skip_first` steps, then
/// cycles of `wait`, `warmup` and `active` steps.
struct DDP_API ProfilerOptions {
  /// False while wait, warmup, active, repeat and skip_first all have their defaults: everything
  /// from the construction to stop() is then one recording, as in Python without a schedule.
  bool has_schedule() const;

  /// Steps at the beginning of a cycle in which the profiler does nothing. Default: 0
  TORCH_ARG(int64_t, wait) = 0;
  /// Steps in which the profiler is prepared, so that the recorded ones do not pay for it.
  /// Default: 0
  TORCH_ARG(int64_t, warmup) = 0;
  /// Steps that are recorded, at least 1. Default: 1
  TORCH_ARG(int64_t, active) = 1;
  /// The number of cycles. Default: 0, without end.
  TORCH_ARG(int64_t, repeat) = 0;
  /// Steps before the first cycle. Default: 0
  TORCH_ARG(int64_t, skip_first) = 0;
  /// The first cycle has no wait. Default: false
  TORCH_ARG(bool, skip_first_wait) = false;
  /// Records the shapes of operators' inputs. Keeps these tensors alive while it records. Default:
  /// false
  TORCH_ARG(bool, record_shapes) = false;
  /// Records allocations and frees. Default: false
  TORCH_ARG(bool, profile_memory) = false;
  /// Records which functions of the program call the operators and ranges: for export_stacks() and
  /// as "Call stack" in the trace. Python's, for C++. Needs addr2line of binutils, and -g for
  /// lines. Default: false
  TORCH_ARG(bool, with_stack) = false;
  /// Called on the thread of the loop, once the last active step of a cycle is over. May export and
  /// average; may not step or stop the profiler.
  TORCH_ARG(std::function<void(Profiler&)>, on_trace_ready) = nullptr;
};

/// The action of a profiler in a step. Python's `torch.profiler.ProfilerAction`.
enum class ProfilerAction { None, Warmup, Record, RecordAndSave };

/// The events of a recording, summed up by name.
struct DDP_API KeyAverages {
  /// The calls of one name. Times are microseconds, memory is bytes.
  struct Entry {
    std::string name;                      ///< of the operator, the kernel or the range
    int64_t count = 0;                     ///< calls
    double cpu_time_total = 0;             ///< including callees
    double self_cpu_time_total = 0;        ///< without callees
    double device_time_total = 0;          ///< of launched kernels; its own for a kernel
    double self_device_time_total = 0;     ///< without callees
    int64_t cpu_memory_usage = 0;          ///< allocated less freed; 0 unless memory was profiled
    int64_t self_cpu_memory_usage = 0;     ///< without callees
    int64_t device_memory_usage = 0;       ///< as cpu_memory_usage
    int64_t self_device_memory_usage = 0;  ///< without callees
    std::vector<std::vector<int64_t>> input_shapes;      ///< where grouped by them
    c10::DeviceType device_type = c10::DeviceType::CPU;  ///< where they ran
    bool is_async = false;            ///< ends on another thread than it begins on
    bool is_user_annotation = false;  ///< a RecordFunctionGuard's, or a step

    /// The mean of one call.
    double cpu_time() const { return count == 0 ? 0 : cpu_time_total / double(count); }
    /// The mean of one call.
    double device_time() const { return count == 0 ? 0 : device_time_total / double(count); }
  };

  /// Python's table of the entries.
  ///
  /// \param sort_by  the name of a number of Entry, or "count"; the largest comes first. "cuda" for
  ///        "device" is understood. "" leaves them in the order of their first calls.
  /// \param row_limit  so many at most; -1: all.
  /// \return "" without entries.
  /// \throws c10::ValueError  another sort_by.
  std::string table(const std::string& sort_by = "cpu_time_total", int row_limit = 100) const;

  /// The first entry of that name; null when there is none.
  const Entry* find(const std::string& name) const;

  std::vector<Entry> entries;   ///< in the order of their first calls
  bool profile_memory = false;  ///< the table has columns of memory
  std::string device;           ///< whose kernels were also recorded: "CUDA"; "" for none
};

/// Records operators, the wrapper and your own ranges in chosen steps of a loop, with LibTorch's
/// profiler (Kineto). As Python's `torch.profiler.profile`: its schedule, Chrome trace and table.
///
/// ```
/// ddp::Profiler profiler(ddp::ProfilerOptions().wait(1).warmup(1).active(3).repeat(1)
///                            .on_trace_ready(ddp::tensorboard_trace_handler("log")));
/// for (auto& batch : *loader) {
///   train(batch);
///   profiler.step();
/// }
/// ```
///
/// It records the thread that constructs it and the backward passes of that thread, not the threads
/// of a loader. On CUDA it records the kernels as well, where LibTorch finds CUPTI. With a schedule
/// each step is a range `ProfilerStep#<number>`.
///
/// Destruction ends as Python's `with` does, also while an exception passes: it stops, and calls
/// on_trace_ready if it was recording. An exception of on_trace_ready becomes a warning.
///
/// A process can have one recording at a time: those of a second profiler must not overlap.
///
/// Threads: construct, step, stop and destroy it on one thread. A profiler that is destroyed
///   elsewhere while it records cannot stop the recording; it warns.
/// Cost: nothing that could be measured outside of warmup and active steps; docs/profiling.md.
/// Source: torch/profiler/profiler.py, torch/autograd/profiler_util.py of 2.11.
class DDP_API Profiler {
 public:
  /// Starts with step 0.
  ///
  /// \throws c10::ValueError  an option out of its range. c10::Error  as step().
  explicit Profiler(const ProfilerOptions& options = {});
  ~Profiler();
  C10_DISABLE_COPY_AND_ASSIGN(Profiler);

  /// Begins the next step.
  ///
  /// \throws c10::Error  after stop(), on another thread, within on_trace_ready; or when a
  ///         recording is to begin while this process has another one: this cycle is then left out.
  ///         Exceptions of on_trace_ready pass through; the schedule has advanced as if there were
  ///         none.
  void step();

  /// Ends the recording, if there is one, and calls on_trace_ready. A second call does nothing.
  ///
  /// \throws c10::Error  as step().
  void stop();

  /// Continues after stop(), with the step in which it was stopped.
  ///
  /// \throws c10::Error  it was not stopped; as step().
  void start();

  /// Writes the last finished recording as JSON for ui.perfetto.dev and chrome://tracing. Its times
  /// are on the clock of `write_trace`, so that both fit into one view.
  ///
  /// \param path  not ".gz". A file that is there is replaced.
  /// \throws c10::Error  there is no recording yet, or the file cannot be written.
  ///         c10::ValueError  the path ends with ".gz".
  void export_chrome_trace(const std::string& path);

  /// Writes the stacks of the last finished recording for flamegraph.pl or speedscope.app, with the
  /// microseconds spent below each: "main;train.cpp(12):_train();aten::mm 123".
  ///
  /// A frame is `file(line):_function` in code compiled with -g, else the function; the last one is
  /// the operator. Frames of LibTorch are left out. As in Python, operators of a backward pass have
  /// the stack of the forward call whose gradient they compute, here with the node of autograd
  /// after it. Unlike in Python, equal stacks are one line.
  ///
  /// \param path  not ".gz". A file that is there is replaced.
  /// \param metric  "self_cpu_time_total", or "self_cuda_time_total" for time of kernels.
  /// \throws c10::Error  there is no recording yet, it is without with_stack, or the file cannot be
  ///         written.  c10::ValueError  another metric, or the path ends with ".gz".
  /// Cost: O(n log n) in its events.
  void export_stacks(
      const std::string& path, const std::string& metric = "self_cpu_time_total") const;

  /// Sums up the last finished recording.
  ///
  /// \param group_by_input_shape  an entry for each name and shapes; needs record_shapes.
  /// \throws c10::Error  there is no recording yet.
  /// Cost: O(n log n) in its events.
  KeyAverages key_averages(bool group_by_input_shape = false) const;

  /// The number of the step, from 0.
  int64_t step_num() const { return step_num_; }
  /// The action of this step.
  ProfilerAction current_action() const { return action_; }

 private:
  void check_thread(const char* call) const;
  void transit(ProfilerAction from, std::optional<ProfilerAction> to);
  void call_on_trace_ready();
  void begin_step();
  profiling::Trace& trace(const char* call) const;

  ProfilerOptions options_;
  int64_t step_num_ = 0;
  ProfilerAction action_ = ProfilerAction::None;
  std::thread::id thread_;
  bool started_ = false;
  bool in_on_trace_ready_ = false;
  std::unique_ptr<profiling::Trace> trace_;  // of the last finished recording
  std::unique_ptr<profiling::Recording> recording_;
  std::unique_ptr<at::RecordFunction> step_range_;
};

/// Makes an on_trace_ready that writes `WORKER_NAME.NANOSECONDS.pt.trace.json` into a folder for
/// TensorBoard's profiler plugin. As Python's.
///
/// \param folder  made when it is missing, with those above it.
/// \param worker_name  differs among ranks. Default: "", the host's name, "_" and the process's id.
DDP_API std::function<void(Profiler&)> tensorboard_trace_handler(
    const std::string& folder, const std::string& worker_name = "");

/// Names a range of code: it appears in the trace and in the averages while a profiler records. As
/// Python's `torch.profiler.record_function`.
///
/// ```
/// const ddp::RecordFunctionGuard range("augment");
/// ```
///
/// Threads: destroy it on the thread that made it, in the reverse order. Cost: tens of nanoseconds
///   where nothing records.
class [[nodiscard]] DDP_API RecordFunctionGuard {
 public:
  /// Begins the range.
  explicit RecordFunctionGuard(const std::string& name);
  C10_DISABLE_COPY_AND_ASSIGN(RecordFunctionGuard);

 private:
  at::RecordFunction range_;
};

}  // namespace ddp
