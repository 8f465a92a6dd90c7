#include "launch/signals.h"

#include <cstring>
#include <initializer_list>

namespace ddp::launch {

sigset_t awaited_signals() {
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int signal : {SIGINT, SIGTERM, SIGQUIT, SIGCHLD}) ::sigaddset(&signals, signal);
  struct sigaction hangup;
  ::sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) ::sigaddset(&signals, SIGHUP);
  return signals;
}

std::string signal_name(int signal) {
  if (const char* name = ::sigabbrev_np(signal)) return std::string("SIG") + name;
  return "signal " + std::to_string(signal);
}

}  // namespace ddp::launch
