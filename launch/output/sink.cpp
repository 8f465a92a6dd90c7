#include "launch/output/sink.h"

#include <algorithm>
#include <cerrno>
#include <climits>

#include <poll.h>
#include <unistd.h>

namespace ddp::launch {

Sink::Sink(int fd)
    : fd_(fd), lines_(::isatty(fd) == 1 ? LineMux::For::Terminal : LineMux::For::File) {}

void Sink::feed(int source, std::string_view bytes) {
  lines_.feed(source, bytes, pending_);
  drop_if_broken();
}

void Sink::finish(int source) {
  lines_.finish(source, pending_);
  drop_if_broken();
}

void Sink::write_ready() {
  while (!empty()) {
    pollfd ready = {fd_, POLLOUT, 0};
    if (::poll(&ready, 1, 0) <= 0) break;
    const size_t size = std::min<size_t>(pending_.size() - written_, PIPE_BUF);
    const ssize_t count = ::write(fd_, pending_.data() + written_, size);
    if (count >= 0) {
      written_ += static_cast<size_t>(count);
    } else if (errno != EAGAIN && errno != EINTR) {
      error_ = errno;
      drop_if_broken();
    } else {
      break;
    }
  }
  // Moving the rest to the front costs at most as much as was written since the last move.
  if (written_ >= pending_.size() - written_) {
    pending_.erase(0, written_);
    written_ = 0;
  }
}

void Sink::drop_if_broken() {
  if (error_ == 0) return;
  pending_.clear();
  written_ = 0;
}

}  // namespace ddp::launch
