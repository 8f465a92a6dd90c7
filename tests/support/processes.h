// Programs under test, alone or as ranks under ddprun: started, talked to, and always ended, with
// all that they have started. Goes without LibTorch.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <sys/types.h>

namespace ddp::testing {

/// What is left of a program that has ended.
struct Ended {
  int code = 0;  // its exit code, or -signal
  std::string out;
  std::string err;
};

/// Longest that anything here waits unless told otherwise; only failing tests wait that long.
constexpr std::chrono::seconds kPatience(30);

struct ProcessOptions {
  std::string input;                              // all of its standard input
  std::vector<std::string> environment;           // "NAME=value" to put in, "NAME" to take out
  bool join_streams = false;                      // stderr into the same pipe as stdout, as 2>&1
  int terminal_columns = 0;                       // of a terminal as its output; 0: a pipe
  std::vector<int> ignored_signals;               // as nohup has it
  std::chrono::milliseconds timeout = kPatience;  // of wait()
};

/// Options that end a program that hangs before CTest would end the test.
inline ProcessOptions within(std::chrono::milliseconds timeout) {
  ProcessOptions options;
  options.timeout = timeout;
  return options;
}

class Process {
 public:
  explicit Process(const std::vector<std::string>& command, const ProcessOptions& options = {});
  /// Kills the program and whatever it has started, in whichever group or session that is.
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  void send(int signal) const;

  /// Reads until `text` has come out `times` times on stdout.
  /// \throws std::runtime_error  with all output, when it ends or takes too long before that.
  void read_until(const std::string& text, int times = 1);

  /// Makes its terminal another width, and tells it, as a terminal's window does.
  void resize_terminal(int columns) const;

  /// Closes the reading end of its stdout, as `| head` does.
  void stop_reading();

  /// Reads to the end and waits.
  /// \throws std::runtime_error  when the timeout is over: names the ranks, or else the processes,
  ///         that still run, with all output.
  Ended wait();

  /// What was read so far.
  const std::string& out() const { return ended_.out; }

 private:
  using Clock = std::chrono::steady_clock;

  bool read_some(Clock::time_point deadline);
  [[noreturn]] void fail(const std::string& what);

  const std::string mark_;  // in the environment of all that it starts
  const std::chrono::milliseconds timeout_;
  pid_t pid_ = -1;
  bool reaped_ = false;
  int out_ = -1;
  int err_ = -1;
  Ended ended_;
};

/// Runs a program to its end.
Ended run(const std::vector<std::string>& command, const ProcessOptions& options = {});

/// A job that has ended.
struct JobEnded {
  int code = 0;                                 // ddprun's
  std::vector<std::vector<std::string>> ranks;  // each rank's lines, of both streams
  std::vector<std::string> ddprun;              // the lines of ddprun's own
  std::string output;                           // all as it came
};

/// Runs a program as `size` ranks under ddprun, to the end of them all.
JobEnded run_job(int size, const std::vector<std::string>& command, ProcessOptions options = {});

/// The command `ddprun <arguments...>`.
std::vector<std::string> ddprun(const std::vector<std::string>& arguments);

/// The command `ddprun <options...> sh -c <script>`.
std::vector<std::string> ddprun_sh(std::vector<std::string> options, const std::string& script);

/// Asks again and again until `condition` holds; false when it does not in time.
bool eventually(
    const std::function<bool()>& condition, std::chrono::milliseconds patience = kPatience);

/// Whether no such process runs (a zombie does not).
bool is_gone(pid_t pid);

/// The numbers that follow `label` in `text`, in order: {12, 14} for "pid 12\npid 14", "pid ".
std::vector<int> numbers_after(const std::string& text, const std::string& label);

std::vector<std::string> lines_of(const std::string& text);

/// The lines of `text`, sorted: ranks speak in any order.
std::vector<std::string> sorted_lines(const std::string& text);

}  // namespace ddp::testing
