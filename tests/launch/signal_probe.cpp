// signal_probe COUNT CODE: prints its pid, waits for COUNT signals, prints each, and exits with
// CODE. A shell would lose a signal that comes while it forks; this program waits for it.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include <unistd.h>

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2}) {
    sigaddset(&signals, signal);
  }
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::printf("parent %d pid %d\n", getppid(), getpid());
  for (int left = std::atoi(argv[1]); left > 0; --left) {
    int signal = 0;
    sigwait(&signals, &signal);
    std::printf("got SIG%s\n", sigabbrev_np(signal));
  }
  return std::atoi(argv[2]);
}
