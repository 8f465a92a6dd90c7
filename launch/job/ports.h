#pragma once

#include <string>

#include <ddp/internal/system/fd.h>

namespace ddp::launch {

/// Whether one of the addresses that `host` stands for is this host's own. Asks the resolver.
bool is_own_host(const std::string& host);

/// Listens on `port` of all addresses.
///
/// \throws std::system_error  when the port is taken.
Fd listen_on(int port);
/// Listens on a free port of loopback_address() alone, which other hosts do not reach.
///
/// \throws std::system_error  when none is free.
Fd listen_on_this_host();

/// Binds a fresh socket, with SO_REUSEADDR, to `port` of all addresses: [::], IPv4 included, or
/// without IPv6 0.0.0.0. 0: to any free port. Empty if it cannot, with errno.
Fd bind_to_port(int port);

/// The port of a bound socket.
/// \throws std::system_error  when it has none.
int port_of(const Fd& fd);

/// A TCP port that the kernel gives to no other process while this lives, and on which rank 0 can
/// listen.
///
/// The socket is bound, with SO_REUSEADDR, and never listens. Linux then gives the port to no bind
/// to port 0 and to no outgoing connection, and a bind to its number fails, unless it too sets
/// SO_REUSEADDR, as c10d's TCPStore does (its libuv server and the older one). So the port cannot
/// be lost between choosing it and listening on it.
///
/// It is bound as TCPStore binds: the reservation holds on every address of the host.
class ReservedPort {
 public:
  /// \throws std::system_error  when no port is free.
  ReservedPort();

  int port() const { return port_; }

 private:
  Fd socket_;
  int port_ = 0;
};

}  // namespace ddp::launch
