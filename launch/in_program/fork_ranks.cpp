#include <ddp/internal/fork_ranks.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <memory>
#include <utility>

#include <dirent.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ddp/internal/ranges.h>
#include <ddp/internal/system/host.h>

#include "launch/in_program/rank_function.h"
#include "launch/job/coordinator.h"
#include "launch/job/host_loop.h"
#include "launch/options.h"
#include "launch/pipe.h"
#include "launch/poll_until.h"
#include "launch/processes/guard.h"
#include "launch/processes/signals.h"
#include "launch/texts.h"

namespace ddp::launch {
namespace {

/// Holds the numbers of a closed stdin, stdout and stderr while it lives: otherwise a pipe would
/// take one, and a rank's output would end up in it.
std::vector<Fd> hold_missing_standard_fds() {
  std::vector<Fd> held;
  for (;;) {
    Fd null(::open("/dev/null", O_RDWR));
    if (!null) throw_errno("cannot open /dev/null");
    if (null.get() > STDERR_FILENO) return held;
    held.push_back(std::move(null));
  }
}

LaunchOptions launch_options(const ForkOptions& options, RankFunction& function) {
  LaunchOptions result;
  result.local_ranks = options.ranks;
  result.grace = options.grace;
  result.prefix = options.prefix;
  result.max_restarts = options.max_restarts;
  result.log_dir = options.log_dir;
  result.omp_threads = options.omp_threads;
  result.function = &function;
  return result;
}

/// Runs the job, in the process that supervises it.
int supervise(const LaunchOptions& options, int lifeline) {
  try {
    const std::string token = "spawn";  // the coordinator has no client outside of this process
    Coordinator coordinator(options, token, std::nullopt);
    return HostLoop(
               options, {loopback_address(), coordinator.port(), token}, &coordinator, lifeline)
        .run();
  } catch (const std::exception& error) {
    options.function->note(error.what());
    return 1;
  }
}

/// Runs the process between the caller and the supervisor. It ends with the caller, and the
/// supervisor with it.
[[noreturn]] void guard(const LaunchOptions& options, pid_t caller) {
  ::setsid();  // Ctrl-C comes from the caller only
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != caller) ::_exit(1);
  ::prctl(PR_SET_NAME, "ddp-guard");
  auto& function = *options.function;
  try {
    const auto end = run_guarded([&](int lifeline) { return supervise(options, lifeline); });
    if (!WIFEXITED(end.status)) {
      function.note("the process that supervised the ranks " + describe_end(end.status));
    }
    for (const Process& process : end.left) {
      function.note("SIGKILL has not ended process " + std::to_string(process.pid) + " yet");
    }
    function.note_end(exit_code_of(end.status));
  } catch (const std::exception& error) {
    function.note(error.what());
    function.note_end(1);
  }
  ::_exit(0);
}

/// Takes the awaited signals in this process while it lives, but for SIGCHLD, which is the
/// program's own.
class TakenSignals {
 public:
  explicit TakenSignals(const sigset_t& blocked_before) : before_(blocked_before) {
    sigset_t signals = awaited_signals();
    ::sigdelset(&signals, SIGCHLD);
    fd_ = open_signals(signals);
  }
  ~TakenSignals() { ::sigprocmask(SIG_SETMASK, &before_, nullptr); }
  TakenSignals(const TakenSignals&) = delete;
  TakenSignals& operator=(const TakenSignals&) = delete;

  /// Passes signals on until the other end of `ended` is closed by all processes.
  ///
  /// \return those that ask for the end, each once.
  std::vector<int> pass_on(pid_t guard, const Fd& ended) const {
    std::vector<int> asked;
    for (;;) {
      std::vector<pollfd> waited = {{fd_.get(), POLLIN, 0}, {ended.get(), POLLIN, 0}};
      poll_until(waited);
      while (const auto signal = next_signal(fd_.get())) {
        ::kill(guard, *signal);
        const bool asks = *signal != SIGWINCH && !is_only_forwarded(*signal);
        if (asks && !contains(asked, *signal)) asked.push_back(*signal);
      }
      if (waited[1].revents != 0) return asked;
    }
  }

 private:
  const sigset_t before_;
  Fd fd_;
};

RanksEnded result_of(const RankFunction& function, const std::vector<int>& signals) {
  RanksEnded ended;
  ended.remarks = function.notes();
  if (!function.code()) ended.remarks.emplace_back("the process that guards the ranks was killed");
  ended.code = function.code().value_or(128 + SIGKILL);
  if (!signals.empty()) ended.signal = signal_name(signals.front());
  const auto failure = function.failure();
  if (ended.code == 0 || !failure) return ended;
  const auto rank = rank_with_pid(failure->rank, failure->pid);
  const auto how = describe_end(failure->status);
  ended.failed = {rank, how, function.thrown(failure->rank)};
  drop_if(ended.remarks, [report = rank + " " + how](const std::string& line) {
    return begins_with(line, report);
  });
  return ended;
}

}  // namespace

RanksEnded fork_ranks(const ForkOptions& options, const std::function<void(int rank)>& body) {
  const auto held = hold_missing_standard_fds();
  RankFunction function(body, options.ranks);
  const auto job = launch_options(options, function);
  std::vector<int> signals;
  {
    const TakenSignals taken(function.blocked());
    Pipe ended = make_pipe();  // the guard and the supervisor have its other end until they end
    flush_streams();
    const pid_t caller = ::getpid();
    const pid_t child = ::fork();
    if (child < 0) throw_errno("cannot start a process");
    if (child == 0) guard(job, caller);
    ended.write.reset();
    signals = taken.pass_on(child, ended.read);
    // Where the program ignores SIGCHLD, or reaps all children itself, there is none to wait for.
    while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  const auto result = result_of(function, signals);
  for (const int signal : signals) ::raise(signal);
  return result;
}

int count_threads() {
  int count = 0;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/task"), ::closedir);
  while (const dirent* entry = folder ? ::readdir(folder.get()) : nullptr) {
    if (entry->d_name[0] != '.') ++count;
  }
  return count;
}

}  // namespace ddp::launch
