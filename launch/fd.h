#pragma once

#include <utility>

#include <unistd.h>

namespace ddp::launch {

/// Owns one file descriptor (-1: none) and closes it.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

struct Pipe {
  Fd read;
  Fd write;
};

/// Makes a pipe whose ends no program started from here inherits.
///
/// \throws std::system_error  when no descriptors are left.
Pipe make_pipe();

/// Makes reads of `fd` return at once. Only for descriptors that no other process shares.
void set_nonblocking(const Fd& fd);

/// Opens /dev/null in the place of a closed stdin, stdout or stderr: otherwise the next pipe would
/// take its number, and a rank's output would end up in it.
void open_missing_standard_fds();

}  // namespace ddp::launch
