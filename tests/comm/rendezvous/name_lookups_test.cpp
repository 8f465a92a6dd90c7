// Connecting to a store asks no name server: it may not answer, or not so many ranks at once.
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>

#include <stdexcept>
#include <string>

#include <ddp/internal/system/host.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/base/name_lookups.h"
#include "comm/rendezvous/wait_for_listener.h"
#include "comm/store/bounded_store.h"
#include "comm/store/tcp_store.h"

#include "support/catch.h"

using namespace std::chrono_literals;

namespace {

/// The look-up that a c10d socket makes of an address that it connects to.
std::pair<int, std::string> name_of(const char* address) {
  sockaddr_in6 peer{};
  peer.sin6_family = AF_INET6;
  ::inet_pton(AF_INET6, address, &peer.sin6_addr);
  char host[NI_MAXHOST] = "";
  char port[NI_MAXSERV] = "";
  const int error = ::getnameinfo(
      reinterpret_cast<sockaddr*>(&peer), sizeof peer, host, sizeof host, port, sizeof port,
      NI_NUMERICSERV);
  return {error, host};
}

/// A store of this process, and the options to connect to it.
struct Host {
  Host() {
    options.isServer = true;
    options.port = 0;
    options.waitWorkers = false;
    options.timeout = 10s;
    server = ddp::open_tcp_store(ddp::loopback_address(), options, &looked_up);
    options.isServer = false;
    options.port = ddp::tcp_store_of(*server)->getPort();
  }

  c10d::TCPStoreOptions options;
  c10::intrusive_ptr<c10d::Store> server;
  int looked_up = -1;
};

}  // namespace

TEST_CASE("look-ups of names find nothing, and say so, while a call runs", "[comm]") {
  std::pair<int, std::string> mapped, other;
  const int count = ddp::without_name_lookups([&] {
    mapped = name_of("::ffff:203.0.113.7");  // RFC 5737 gives it to no host
    other = name_of("2001:db8::7");
  });
  // Not EAI_AGAIN, of which c10d prints a warning.
  CHECK(mapped == std::make_pair(0, std::string("::ffff:203.0.113.7")));
  CHECK(other == std::make_pair(0, std::string("2001:db8::7")));
  CHECK(count == 2);
}

TEST_CASE("a call without look-ups of names throws what it throws", "[comm]") {
  const auto call = [] { throw std::out_of_range("boom"); };
  CHECK_THROWS_AS(ddp::without_name_lookups(call), std::out_of_range);
}

TEST_CASE("a store's connections ask no name server", "[comm]") {
  Host host;
  CHECK(host.looked_up >= 1);  // which c10d tried
  int looked_up = 0;
  const auto client = ddp::open_tcp_store(ddp::loopback_address(), host.options, &looked_up);
  CHECK(looked_up >= 1);
  client->set("key", "value");
  CHECK(host.server->get_to_str("key") == "value");

  looked_up = 0;
  const auto prefixed = c10::make_intrusive<c10d::PrefixStore>("under", client);
  const auto again = ddp::clone_store(*prefixed, &looked_up);
  CHECK(looked_up >= 1);
  again->set("key", "other");
  CHECK(host.server->get_to_str("under/key") == "other");
}

TEST_CASE("a listener's host is found in numbers", "[comm]") {
  const Host host;
  std::string number;
  CHECK(
      ddp::wait_for_listener("localhost", host.options.port, ddp::Deadline(10s), &number).empty());
  CHECK((number == ddp::loopback_address() || number == "::1"));
  CHECK(ddp::own_address_in_numbers("localhost", ddp::Deadline(10s)) == ddp::loopback_address());
  CHECK(ddp::own_address_in_numbers("203.0.113.7", ddp::Deadline(10s)).empty());  // of no host
  CHECK(ddp::own_address_in_numbers("no-such-host.invalid", ddp::Deadline(0ms)).empty());
}
