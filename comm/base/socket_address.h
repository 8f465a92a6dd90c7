#pragma once

#include <sys/socket.h>

#include <chrono>
#include <string>
#include <vector>

namespace ddp {

/// An address of a socket, IPv4 or IPv6.
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

}  // namespace ddp
