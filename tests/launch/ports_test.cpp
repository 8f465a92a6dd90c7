#include "launch/job/ports.h"

#include <cerrno>
#include <set>
#include <vector>

#include <netinet/in.h>
#include <sys/socket.h>

#include <ddp/internal/system/host.h>

#include "support/catch.h"

using ddp::Fd;
using ddp::launch::ReservedPort;

namespace {

/// Binds to `port` of all (or only the loopback) IPv4 addresses and listens; returns 0 or errno.
int listen_on(int port, bool reuse, in_addr_t address) {
  Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = reuse ? 1 : 0;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in name = {};
  name.sin_family = AF_INET;
  name.sin_port = htons(static_cast<in_port_t>(port));
  name.sin_addr.s_addr = htonl(address);
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&name), sizeof(name)) != 0) return errno;
  return ::listen(fd.get(), 1) == 0 ? 0 : errno;
}

}  // namespace

TEST_CASE("no other process gets a reserved port, but a store can listen on it", "[process]") {
  const auto address = GENERATE(INADDR_ANY, INADDR_LOOPBACK);
  int port = 0;
  {
    const ReservedPort reserved;
    port = reserved.port();
    CAPTURE(port);
    REQUIRE(port > 0);
    CHECK(listen_on(port, /*reuse=*/false, address) == EADDRINUSE);
    CHECK(listen_on(port, /*reuse=*/true, address) == 0);
    CHECK(listen_on(port, /*reuse=*/true, address) == 0);  // a second time, as after a restart
  }
  CHECK(listen_on(port, /*reuse=*/false, address) == 0);
}

TEST_CASE("ports reserved at the same time differ", "[process]") {
  std::vector<ReservedPort> reserved(500);
  std::set<int> ports;
  for (const auto& one : reserved) ports.insert(one.port());
  CHECK(ports.size() == reserved.size());
}

TEST_CASE("a host is this one by its name, or by an address that one may bind here", "[process]") {
  using ddp::launch::is_own_host;
  CHECK(is_own_host(ddp::host_name()));
  CHECK(is_own_host("127.0.0.1"));
  CHECK(is_own_host("127.0.1.1"));  // a host's own name in Debian, though no interface lists it
  CHECK_FALSE(is_own_host("192.0.2.1"));
  CHECK_FALSE(is_own_host("no..host"));
}
