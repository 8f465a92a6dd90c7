#include "launch/pipe.h"

#include <cerrno>
#include <system_error>

#include <fcntl.h>

namespace ddp::launch {

Pipe make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot make a pipe");
  }
  return {Fd(ends[0]), Fd(ends[1])};
}

void set_nonblocking(const Fd& fd) {
  if (::fcntl(fd.get(), F_SETFL, O_NONBLOCK) != 0) {
    throw std::system_error(
        errno, std::generic_category(), "cannot make a rank's output non-blocking");
  }
}

void open_missing_standard_fds() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (::fcntl(fd, F_GETFD) != -1) continue;
    // The lowest free number is the one just found closed.
    if (::open("/dev/null", O_RDWR) != fd) {
      throw std::system_error(errno, std::generic_category(), "cannot open /dev/null");
    }
  }
}

}  // namespace ddp::launch
