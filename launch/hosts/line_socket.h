#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "launch/fd.h"

namespace ddp::launch {

/// Carries short lines between two ddpruns, over TCP.
class LineSocket {
 public:
  LineSocket() = default;
  /// Takes over a connected socket. Notices within 30 s that a host is gone without closing it.
  explicit LineSocket(Fd fd);

  int fd() const { return fd_.get(); }
  explicit operator bool() const { return static_cast<bool>(fd_); }
  void close() { fd_.reset(); }
  /// Gives the socket away.
  Fd release() { return std::move(fd_); }

  /// Sends a line; if it cannot be sent, the next read reports it.
  void send_line(const std::string& line) const;

  /// Waits for the next line.
  ///
  /// \return nothing when the peer is gone, silent for `timeout`, or sends a line that is too long.
  std::optional<std::string> read_line(std::chrono::milliseconds timeout) const;

 private:
  Fd fd_;
};

/// Connects to `host`; empty when nothing listens there now, or the name cannot be resolved.
LineSocket connect_to(const std::string& host, int port);

/// Listens on `port` of all addresses.
///
/// \throws std::system_error  when the port is taken.
Fd listen_on(int port);

}  // namespace ddp::launch
