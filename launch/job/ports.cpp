#include "launch/job/ports.h"

#include <cstdint>
#include <string>

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <ddp/internal/system/host.h>

#include "launch/texts.h"

namespace ddp::launch {

constexpr int kBacklog = 128;

bool is_own_host(const std::string& host) {
  // A pod knows its own name before the cluster does.
  if (host == host_name()) return true;
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return false;
  bool is_own = false;
  for (const addrinfo* one = found; one != nullptr && !is_own; one = one->ai_next) {
    is_own = is_own_address(one->ai_addr, one->ai_addrlen);
  }
  ::freeaddrinfo(found);
  return is_own;
}

Fd listen_on(int port) {
  Fd fd = bind_to_port(port);
  if (fd && ::listen(fd.get(), kBacklog) == 0) return fd;
  throw_errno("cannot listen on port " + std::to_string(port));
}

Fd listen_on_this_host() {
  const auto host = loopback_address();
  const bool is_v4 = host.find(':') == std::string::npos;
  sockaddr_storage address = {};
  address.ss_family = is_v4 ? AF_INET : AF_INET6;
  auto& v4 = reinterpret_cast<sockaddr_in&>(address);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
  void* number = is_v4 ? static_cast<void*>(&v4.sin_addr) : &v6.sin6_addr;
  ::inet_pton(address.ss_family, host.c_str(), number);
  Fd fd(::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const socklen_t length = is_v4 ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  const auto* general = reinterpret_cast<const sockaddr*>(&address);
  if (fd && ::bind(fd.get(), general, length) == 0 && ::listen(fd.get(), kBacklog) == 0) return fd;
  throw_errno("cannot listen on " + host);
}

int port_of(const Fd& fd) {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    throw_errno("cannot read the reserved port");
  }
  return ntohs(
      address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                    : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

Fd bind_to_port(int port) {
  const int on = 1;
  const int off = 0;
  for (const int family : {AF_INET6, AF_INET}) {
    Fd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!fd) continue;
    ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    // All zeros is "any address" in both families.
    sockaddr_storage any = {};
    any.ss_family = static_cast<sa_family_t>(family);
    socklen_t length = sizeof(sockaddr_in);
    reinterpret_cast<sockaddr_in&>(any).sin_port = htons(static_cast<uint16_t>(port));
    if (family == AF_INET6) {
      ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
      reinterpret_cast<sockaddr_in6&>(any).sin6_port = htons(static_cast<uint16_t>(port));
      length = sizeof(sockaddr_in6);
    }
    if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&any), length) == 0) return fd;
  }
  return {};
}

ReservedPort::ReservedPort() : socket_(bind_to_port(0)) {
  if (!socket_) throw_errno("cannot reserve a TCP port");
  port_ = port_of(socket_);
}

}  // namespace ddp::launch
