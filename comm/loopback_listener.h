#pragma once

#include <optional>
#include <string>
#include <utility>

#include <unistd.h>

namespace ddp {

/// Owns a socket, until somebody else does.
class OwnedSocket {
 public:
  explicit OwnedSocket(int fd) : fd_(fd) {}
  OwnedSocket(OwnedSocket&& other) noexcept : fd_(other.release()) {}
  OwnedSocket& operator=(OwnedSocket&&) = delete;
  ~OwnedSocket() {
    if (fd_ >= 0) ::close(fd_);
  }

  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

/// Binds a socket to a loopback address and listens, for a TCPStore to take over: c10d's own socket
/// listens on all addresses of the host, and whoever reaches it may read and write every key.
///
/// \param host  as the ranks know it. Only what is a loopback address by its spelling counts:
///         "localhost", 127.x.y.z, ::1. A host's own name may resolve to 127.0.1.1 on the host
///         itself, and to another address elsewhere.
/// \param port  1 to 65535.
/// \return  nothing where the host is no loopback address, or the port is not to be had: then
///         TCPStore's own attempt says why, or finds the store that this process has there already.
std::optional<OwnedSocket> listen_on_loopback(const std::string& host, int port);

}  // namespace ddp
