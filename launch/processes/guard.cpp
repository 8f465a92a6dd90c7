#include "launch/processes/guard.h"

#include <chrono>
#include <csignal>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "launch/pipe.h"
#include "launch/processes/signals.h"
#include "launch/texts.h"

namespace ddp::launch {
namespace {

constexpr std::chrono::seconds kKillLimit(2);

/// Passes signals on to `child` until it has ended; returns its wait status.
int forward_signals_until_end(pid_t child, const sigset_t& signals) {
  for (;;) {
    const int signal = ::sigwaitinfo(&signals, nullptr);
    if (signal < 0) continue;  // this process was stopped and continued
    if (signal != SIGCHLD) {
      ::kill(child, signal);
      continue;
    }
    if (const auto status = reap(child, WNOHANG)) return *status;
  }
}

}  // namespace

GuardedEnd run_guarded(const std::function<int(int lifeline)>& supervise) {
  const sigset_t signals = awaited_signals();
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  // The process that started this one may ignore SIGCHLD; then the kernel would report no child's
  // end.
  ::signal(SIGCHLD, SIG_DFL);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  Pipe lifeline = make_pipe();

  const pid_t child = ::fork();
  if (child < 0) throw_errno("cannot start a process");
  if (child == 0) {
    lifeline.write.reset();
    ::setsid();
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    ::prctl(PR_SET_NAME, "ddp-supervisor");
    ::_exit(supervise(lifeline.read.get()));
  }
  lifeline.read.reset();

  const int status = forward_signals_until_end(child, signals);
  return {status, kill_descendants(kKillLimit)};
}

}  // namespace ddp::launch
