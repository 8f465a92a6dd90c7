#include "launch/output/pseudo_terminal.h"

#include <cstdlib>

#include <fcntl.h>
#include <limits.h>
#include <termios.h>

namespace ddp::launch {

std::optional<PseudoTerminal> make_pseudo_terminal() {
  // O_NOCTTY: the launcher sends a rank's Ctrl-C and hangup, and not this terminal.
  PseudoTerminal made;
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

}  // namespace ddp::launch
