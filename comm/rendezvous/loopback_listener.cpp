#include "rendezvous/loopback_listener.h"

#include <sys/socket.h>

#include <ddp/internal/system/loopback.h>

#include "base/socket_address.h"

namespace ddp {

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
