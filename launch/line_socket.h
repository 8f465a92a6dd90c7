#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "launch/fd.h"

namespace ddp::launch {

/// A TCP connection between two ddpruns that carries short lines.
class LineSocket {
 public:
  LineSocket() = default;
  /// Takes over a connected socket; a host that is gone without a word is noticed within 30 s.
  explicit LineSocket(Fd fd);

  int fd() const { return fd_.get(); }
  explicit operator bool() const { return static_cast<bool>(fd_); }
  void close() { fd_.reset(); }

  /// Sends a line; one that cannot be sent is noticed by the next read.
  void send_line(const std::string& line) const;

  /// Waits for the next line.
  ///
  /// \return nothing when the peer is gone, silent for `timeout`, or sends more than a line holds.
  std::optional<std::string> read_line(std::chrono::milliseconds timeout) const;

 private:
  Fd fd_;
};

/// Connects to `host`; empty when nothing listens there now, or the host is not known.
LineSocket connect_to(const std::string& host, int port);

/// Listens on `port` of all addresses.
///
/// \throws std::system_error  when the port is taken.
Fd listen_on(int port);

}  // namespace ddp::launch
