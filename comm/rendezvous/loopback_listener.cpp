#include "rendezvous/loopback_listener.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>

namespace ddp {
namespace {

constexpr uint32_t kLoopbackNet = 127;

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;  // 0: no loopback address
};

Address v4(in_addr address, int port) {
  Address result;
  auto& name = reinterpret_cast<sockaddr_in&>(result.storage);
  name.sin_family = AF_INET;
  name.sin_port = htons(static_cast<in_port_t>(port));
  name.sin_addr = address;
  if (ntohl(address.s_addr) >> 24 == kLoopbackNet) result.length = sizeof(name);
  return result;
}

Address v6(in6_addr address, int port) {
  Address result;
  auto& name = reinterpret_cast<sockaddr_in6&>(result.storage);
  name.sin6_family = AF_INET6;
  name.sin6_port = htons(static_cast<in_port_t>(port));
  name.sin6_addr = address;
  if (IN6_IS_ADDR_LOOPBACK(&address)) result.length = sizeof(name);
  return result;
}

Address loopback_address(const std::string& host, int port) {
  in_addr four{};
  in6_addr six{};
  if (::inet_pton(AF_INET, host == "localhost" ? "127.0.0.1" : host.c_str(), &four) == 1) {
    return v4(four, port);
  }
  return ::inet_pton(AF_INET6, host.c_str(), &six) == 1 ? v6(six, port) : Address{};
}

}  // namespace

Fd listen_on_loopback(const std::string& host, int port) {
  const auto address = loopback_address(host, port);
  if (address.length == 0) return {};
  Fd socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) return {};
  const int on = 1;
  // As TCPStore does: for a port that ddprun has reserved, and for a restart.
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const auto* name = reinterpret_cast<const sockaddr*>(&address.storage);
  // listen() fails if another socket with SO_REUSEADDR listens already.
  if (::bind(socket.get(), name, address.length) != 0) return {};
  if (::listen(socket.get(), SOMAXCONN) != 0) return {};
  return socket;
}

}  // namespace ddp
