#pragma once

#include <sys/socket.h>

#include <chrono>
#include <string>
#include <vector>

#include <ddp/internal/system/fd.h>

namespace ddp {

struct SocketAddress {
  SocketAddress() = default;
  SocketAddress(const sockaddr* address, socklen_t size);

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }

  sockaddr_storage storage{};
  socklen_t length = 0;  // 0: no address
};

/// Parses numbers only, so that no name is looked up. No address if they are malformed.
SocketAddress parse_address(const std::string& host, const std::string& port);

bool is_loopback(const sockaddr* address);

/// Connects to all addresses at the same time, and closes the connections at once.
///
/// \return  errno of each attempt: 0 if something listens there, ETIMEDOUT if there is no answer
///         within `at_most`.
std::vector<int> errors_of_connecting(
    const std::vector<SocketAddress>& addresses, std::chrono::milliseconds at_most);

/// Binds a socket to a loopback address and listens, for a TCPStore to use: c10d's own socket
/// listens on all addresses of the host, and any process that can connect to it can read and write
/// every key.
///
/// \param host  as the ranks spell it. Only a spelling of a loopback address counts: "localhost",
///         127.x.y.z, ::1. A host's own name may resolve to 127.0.1.1 on the host itself, and to
///         another address elsewhere.
/// \param port  1 to 65535.
/// \return  an empty one if the host is not a loopback address, or the port is taken: then
///         TCPStore's own attempt reports why, or finds the store that this process already has
///         there.
Fd listen_on_loopback(const std::string& host, int port);

}  // namespace ddp
