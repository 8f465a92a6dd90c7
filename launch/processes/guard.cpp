#include "launch/processes/guard.h"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <string>
#include <system_error>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "launch/pipe.h"
#include "launch/processes/process_tree.h"
#include "launch/processes/signals.h"

namespace ddp::launch {
namespace {

constexpr std::chrono::seconds kKillLimit(2);

/// Passes signals on to `child` until it has ended; returns its wait status.
int forward_signals_until_end(pid_t child, const sigset_t& signals) {
  for (;;) {
    const int signal = ::sigwaitinfo(&signals, nullptr);
    if (signal < 0) continue;  // ddprun was stopped and continued
    if (signal != SIGCHLD) {
      ::kill(child, signal);
      continue;
    }
    if (const auto status = reap(child, WNOHANG)) return *status;
  }
}

}  // namespace

int run_guarded(const std::function<int(int lifeline)>& job) {
  const sigset_t signals = awaited_signals();
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  // The process that started ddprun may ignore SIGCHLD; then the kernel would report no child's
  // end.
  ::signal(SIGCHLD, SIG_DFL);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  Pipe lifeline = make_pipe();

  const pid_t child = ::fork();
  if (child < 0) throw std::system_error(errno, std::generic_category(), "cannot start a process");
  if (child == 0) {
    lifeline.write.reset();
    ::setsid();
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    ::prctl(PR_SET_NAME, "ddp-supervisor");
    ::_exit(job(lifeline.read.get()));
  }
  lifeline.read.reset();

  const int status = forward_signals_until_end(child, signals);
  std::string left;
  for (const Process& process : kill_descendants(kKillLimit)) {
    left += " " + std::to_string(process.pid);
  }
  if (!left.empty()) {
    std::fprintf(stderr, "ddprun: SIGKILL has not ended these processes yet:%s\n", left.c_str());
  }
  if (WIFEXITED(status)) return WEXITSTATUS(status);
  std::fprintf(
      stderr, "ddprun: its supervisor was killed by signal %d (%s); ended all ranks\n",
      WTERMSIG(status), signal_name(WTERMSIG(status)).c_str());
  return 128 + WTERMSIG(status);
}

}  // namespace ddp::launch
