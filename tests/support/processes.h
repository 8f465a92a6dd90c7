// Runs programs under test, alone or as ranks under ddprun, and always ends them with all the
// processes that they have started. Does not need LibTorch.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <ddp/internal/system/fd.h>
#include <sys/types.h>

namespace ddp::testing {

/// The result of a program that has ended.
struct Ended {
  int code = 0;  // its exit code, or -signal
  std::string out;
  std::string err;
};

/// The default limit of all waits here; only failing tests wait that long.
constexpr std::chrono::seconds kPatience(60);

struct ProcessOptions {
  std::string input;                              // all of its standard input
  std::vector<std::string> environment;           // "NAME=value" to set, "NAME" to remove
  bool join_streams = false;                      // stderr into the same pipe as stdout, as 2>&1
  int terminal_columns = 0;                       // width of a terminal for its output; 0: a pipe
  int pipe_bytes = 0;                             // that it can write before a read; 0: 64 KiB
  std::vector<int> ignored_signals;               // ignored from its start, as by nohup
  std::chrono::milliseconds timeout = kPatience;  // of wait()
};

/// Options that end a hanging program before CTest ends the test.
inline ProcessOptions within(std::chrono::milliseconds timeout) {
  ProcessOptions options;
  options.timeout = timeout;
  return options;
}

/// The options with stderr in the program's `out`, in the order in which it was written.
inline ProcessOptions in_one_stream(ProcessOptions options = {}) {
  options.join_streams = true;
  return options;
}

class Process {
 public:
  explicit Process(const std::vector<std::string>& command, const ProcessOptions& options = {});
  /// Kills the program and all processes that it has started, in whichever group or session they
  /// are.
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  void send(int signal) const;

  /// Reads until `text` has appeared `times` times on stdout.
  /// \throws std::runtime_error  with all output, when it ends or takes too long before that.
  void read_until(const std::string& text, int times = 1);

  /// Changes the width of its terminal, and sends SIGWINCH, as a terminal's window does.
  void resize_terminal(int columns) const;

  /// Closes the reading end of its stdout, as `| head` does.
  void stop_reading();

  /// Reads to the end and waits.
  /// \throws std::runtime_error  when the timeout is over: names the ranks, or else the processes,
  ///         that still run, with all output.
  Ended wait();

  /// The output read so far.
  const std::string& out() const { return ended_.out; }

 private:
  using Clock = std::chrono::steady_clock;

  bool read_some(Clock::time_point deadline);
  [[noreturn]] void fail(const std::string& what);

  const std::string mark_;  // in the environment of all its processes
  const std::chrono::milliseconds timeout_;
  pid_t pid_ = -1;
  bool reaped_ = false;
  Fd out_;
  Fd err_;
  Ended ended_;
};

/// Runs a program to its end.
Ended run(const std::vector<std::string>& command, const ProcessOptions& options = {});

/// A job that has ended.
struct JobEnded {
  int code = 0;                                 // ddprun's
  std::vector<std::vector<std::string>> ranks;  // each rank's lines, of both streams
  std::vector<std::string> ddprun;              // ddprun's own lines
  std::string output;                           // all output in order
};

/// Runs a program as `size` ranks under ddprun, until all have ended.
JobEnded run_job(int size, const std::vector<std::string>& command, ProcessOptions options = {});

/// The command `ddprun <arguments...>`.
std::vector<std::string> ddprun(const std::vector<std::string>& arguments);

/// The command `ddprun <options...> sh -c <script>`.
std::vector<std::string> ddprun_sh(std::vector<std::string> options, const std::string& script);

/// Polls until `condition` holds; returns false when it does not in time.
bool eventually(
    const std::function<bool()>& condition, std::chrono::milliseconds patience = kPatience);

/// Whether no such process runs (a zombie does not run).
bool is_gone(pid_t pid);

/// Returns the numbers that follow `label` in `text`, in order: {12, 14} for "pid 12\npid 14", "pid
/// ".
std::vector<int> numbers_after(const std::string& text, const std::string& label);

/// The id of the last process that had the slot, in the output of an elastic job's ranks.
inline int pid_of_slot(const std::string& out, int slot) {
  return numbers_after(out, "slot " + std::to_string(slot) + " pid ").back();
}

/// Waits until ddprun says so: only then all its ranks can be lost without starting all again.
inline void wait_for_generation(Process& job, int generation) {
  job.read_until("ddprun: generation " + std::to_string(generation) + ": ");
}

std::vector<std::string> lines_of(const std::string& text);

/// Returns the lines of `text`, sorted: ranks write in any order.
std::vector<std::string> sorted_lines(const std::string& text);

}  // namespace ddp::testing
