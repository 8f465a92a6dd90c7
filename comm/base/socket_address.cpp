#include "base/socket_address.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include <ddp/internal/system/host.h>

#include "base/deadline.h"

namespace ddp {

SocketAddress::SocketAddress(const sockaddr* address, socklen_t size) : length(size) {
  std::memcpy(&storage, address, size);
}

SocketAddress parse_address(const std::string& host, const std::string& port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return {};
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(found, freeaddrinfo);
  return {found->ai_addr, found->ai_addrlen};
}

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    return ntohl(v4->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  }
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(address);
  return address->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
}

std::vector<int> errors_of_connecting(
    const std::vector<SocketAddress>& addresses, std::chrono::milliseconds at_most) {
  std::vector<int> errors;
  std::vector<Fd> sockets;
  std::vector<pollfd> waiting;
  for (const auto& address : addresses) {
    Fd socket(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const bool connected = socket && ::connect(socket.get(), address.get(), address.length) == 0;
    errors.push_back(connected ? 0 : errno);
    const bool waits = errors.back() == EINPROGRESS;
    waiting.push_back({waits ? socket.get() : -1, POLLOUT, 0});  // poll skips -1
    sockets.push_back(std::move(socket));
  }
  const Deadline deadline(at_most);
  const auto is_waiting = [](const pollfd& one) { return one.fd >= 0; };
  while (std::any_of(waiting.begin(), waiting.end(), is_waiting) && !deadline.passed()) {
    ::poll(waiting.data(), waiting.size(), static_cast<int>(deadline.left().count()));
    for (size_t i = 0; i < waiting.size(); ++i) {
      if (!is_waiting(waiting[i]) || waiting[i].revents == 0) continue;
      socklen_t length = sizeof(int);
      if (::getsockopt(waiting[i].fd, SOL_SOCKET, SO_ERROR, &errors[i], &length) != 0) {
        errors[i] = errno;
      }
      waiting[i].fd = -1;
    }
  }
  std::replace(errors.begin(), errors.end(), EINPROGRESS, ETIMEDOUT);
  return errors;
}

Fd listen_on_loopback(const std::string& host, int port) {
  const auto address =
      parse_address(host == "localhost" ? loopback_address() : host, std::to_string(port));
  if (!is_loopback(address.get())) return {};
  Fd socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) return {};
  const int on = 1;
  // As TCPStore does: for a port that ddprun has reserved, and for a restart.
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  // listen() fails if another socket with SO_REUSEADDR listens already.
  if (::bind(socket.get(), address.get(), address.length) != 0) return {};
  if (::listen(socket.get(), SOMAXCONN) != 0) return {};
  return socket;
}

}  // namespace ddp
