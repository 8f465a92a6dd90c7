#include "launch/pipe.h"

#include <cstdlib>

#include <fcntl.h>
#include <limits.h>
#include <termios.h>

#include "launch/texts.h"

namespace ddp::launch {

Pipe make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw_errno("cannot make a pipe");
  return {Fd(ends[0]), Fd(ends[1])};
}

std::optional<Pipe> make_pseudo_terminal() {
  // O_NOCTTY: the launcher sends a rank's Ctrl-C and hangup, and not this terminal.
  Pipe made;
  made.read = Fd(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  char name[PATH_MAX];
  if (!made.read || ::grantpt(made.read.get()) != 0 || ::unlockpt(made.read.get()) != 0 ||
      ::ptsname_r(made.read.get(), name, sizeof name) != 0) {
    return std::nullopt;
  }
  made.write = Fd(::open(name, O_RDWR | O_NOCTTY | O_CLOEXEC));
  termios attributes{};
  if (!made.write || ::tcgetattr(made.write.get(), &attributes) != 0) return std::nullopt;
  ::cfmakeraw(&attributes);
  if (::tcsetattr(made.write.get(), TCSANOW, &attributes) != 0) return std::nullopt;
  return made;
}

std::optional<winsize> terminal_size(int fd) {
  winsize size{};
  if (::ioctl(fd, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return std::nullopt;
  return size;
}

void set_terminal_size(const Fd& fd, const winsize& size) { ::ioctl(fd.get(), TIOCSWINSZ, &size); }

void set_nonblocking(const Fd& fd) {
  if (::fcntl(fd.get(), F_SETFL, O_NONBLOCK) != 0) {
    throw_errno("cannot make a rank's output non-blocking");
  }
}

void open_missing_standard_fds() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (::fcntl(fd, F_GETFD) != -1) continue;
    // The lowest free number is the one just found closed.
    if (::open("/dev/null", O_RDWR) != fd) throw_errno("cannot open /dev/null");
  }
}

}  // namespace ddp::launch
