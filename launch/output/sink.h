#pragma once

#include <string>
#include <string_view>

#include "launch/output/line_mux.h"

namespace ddp::launch {

/// Writes the ranks' lines to a descriptor of ddprun's own, and never blocks.
///
/// The descriptor is shared with the process that started ddprun, so it is not made non-blocking. A
/// pipe that poll calls writable takes PIPE_BUF bytes at once, so writes are no larger than that.
class Sink {
 public:
  /// Lines are plain where `fd` is no terminal.
  explicit Sink(int fd);

  int add_source(std::string prefix) { return lines_.add_source(std::move(prefix)); }
  void feed(int source, std::string_view bytes);
  void finish(int source);

  /// Writes as much as the reader takes now.
  void write_ready();

  int fd() const { return fd_; }
  bool empty() const { return written_ == pending_.size(); }
  /// Whether the caller has to stop feeding until the reader has caught up.
  bool full() const { return pending_.size() - written_ > kMaxPending; }
  /// errno of a failed write, or 0. After a failed write all further bytes are dropped.
  int error() const { return error_; }

 private:
  static constexpr size_t kMaxPending = size_t{1} << 20;

  void drop_if_broken();

  int fd_;
  LineMux lines_;
  std::string pending_;
  size_t written_ = 0;  // bytes of pending_
  int error_ = 0;
};

}  // namespace ddp::launch
