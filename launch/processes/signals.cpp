#include "launch/processes/signals.h"

#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <initializer_list>

#include "launch/texts.h"

namespace ddp::launch {

sigset_t awaited_signals() {
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int signal : {SIGINT, SIGTERM, SIGQUIT, SIGHUP, SIGUSR1, SIGUSR2, SIGWINCH, SIGCHLD}) {
    if (!is_ignored_by_caller(signal)) ::sigaddset(&signals, signal);
  }
  return signals;
}

bool is_ignored_by_caller(int signal) {
  if (signal != SIGHUP && !is_only_forwarded(signal)) return false;
  struct sigaction action;
  ::sigaction(signal, nullptr, &action);
  return action.sa_handler == SIG_IGN;
}

bool is_only_forwarded(int signal) { return signal == SIGUSR1 || signal == SIGUSR2; }

Fd open_signals(const sigset_t& signals) {
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  Fd fd(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd) throw_errno("cannot await signals");
  return fd;
}

std::optional<int> next_signal(int fd) {
  signalfd_siginfo info;
  if (::read(fd, &info, sizeof(info)) != sizeof(info)) return std::nullopt;
  return static_cast<int>(info.ssi_signo);
}

std::string signal_name(int signal) {
  if (const char* name = ::sigabbrev_np(signal)) return std::string("SIG") + name;
  return "signal " + std::to_string(signal);
}

std::string describe_end(int status) {
  if (WIFEXITED(status)) return "exited with code " + std::to_string(WEXITSTATUS(status));
  const int signal = WTERMSIG(status);
  return "was killed by signal " + std::to_string(signal) + " (" + signal_name(signal) + ")";
}

int exit_code_of(int status) {
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace ddp::launch
