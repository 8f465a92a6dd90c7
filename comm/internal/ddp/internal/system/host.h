// This host: its name and its addresses. Without LibTorch, because ddprun uses it too.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include <ddp/internal/system/fd.h>

namespace ddp {

/// This host's name, or "localhost" where it has none. Two hosts may have the same.
inline std::string host_name() {
  char name[256] = {};
  const bool known = ::gethostname(name, sizeof name - 1) == 0 && name[0] != '\0';
  return known ? name : "localhost";
}

/// Equal in processes that run on one kernel and see each other's process ids and addresses. Other
/// containers and network namespaces have another one, so these can represent hosts. Empty if the
/// kernel does not tell.
inline std::string host_identity() {
  std::string identity;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> identity;
  if (identity.empty()) return "";
  for (const char* kind : {"/proc/self/ns/pid", "/proc/self/ns/net"}) {
    struct stat info {};
    identity += "/" + (::stat(kind, &info) == 0 ? std::to_string(info.st_ino) : "?");
  }
  return identity;
}

/// Whether an interface of this host has the address, as far as binding a socket to it shows: so
/// all of 127.0.0.0/8, to which Debian maps a host's own name.
inline bool is_own_address(const sockaddr* address, socklen_t length) {
  const Fd socket(::socket(address->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return socket && ::bind(socket.get(), address, length) == 0;
}

/// Whether this host has a numeric address.
inline bool has_address(const std::string& host) {
  sockaddr_in v4{};
  sockaddr_in6 v6{};
  v4.sin_family = AF_INET;
  v6.sin6_family = AF_INET6;
  const bool is_v4 = ::inet_pton(AF_INET, host.c_str(), &v4.sin_addr) == 1;
  if (!is_v4 && ::inet_pton(AF_INET6, host.c_str(), &v6.sin6_addr) != 1) return false;
  return is_v4 ? is_own_address(reinterpret_cast<const sockaddr*>(&v4), sizeof v4)
               : is_own_address(reinterpret_cast<const sockaddr*>(&v6), sizeof v6);
}

/// The address of this host's loopback interface: 127.0.0.1, or ::1 where that has no IPv4 one.
inline std::string loopback_address() {
  return has_address("127.0.0.1") || !has_address("::1") ? "127.0.0.1" : "::1";
}

}  // namespace ddp
