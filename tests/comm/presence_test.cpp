// Whether a peer still exists, as its listening socket tells.
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/presence.h"

#include "support/catch.h"

using namespace std::chrono_literals;
using ddp::GlooDevices;
using ddp::Presence;
using ddp::PresenceSocket;
using ddp::probe;

namespace {

const GlooDevices kLoopback{{}, "127.0.0.1"};

}  // namespace

TEST_CASE("a peer is present for as long as its socket lives", "[comm][errors]") {
  const PresenceSocket lives(kLoopback);
  auto ends = std::make_unique<PresenceSocket>(kLoopback);
  const std::vector<std::string> addresses{lives.address(), ends->address()};
  CHECK((probe(addresses, 5s) == std::vector<Presence>{Presence::Present, Presence::Present}));
  ends.reset();
  CHECK((probe(addresses, 5s) == std::vector<Presence>{Presence::Present, Presence::Gone}));
}

TEST_CASE("a process that a peer forked is not the peer", "[comm][errors]") {
  auto socket = std::make_unique<PresenceSocket>(kLoopback);
  const auto address = socket->address();
  int lives[2], runs[2];
  REQUIRE((pipe(lives) == 0 && pipe(runs) == 0));
  const auto child = fork();
  char byte = 0;
  if (child == 0) {
    close(lives[1]);
    const auto told = write(runs[1], &byte, 1);
    _exit(
        static_cast<int>(told - 1 + read(lives[0], &byte, 1)));  // until the parent closes its end
  }
  close(lives[0]);
  REQUIRE(read(runs[0], &byte, 1) == 1);
  CHECK(probe({address}, 5s).front() == Presence::Present);
  socket.reset();
  CHECK(probe({address}, 5s).front() == Presence::Gone);
  for (const int end : {lives[1], runs[0], runs[1]}) close(end);
  waitpid(child, nullptr, 0);
}

TEST_CASE("an address that no host answers at is silent", "[comm][errors]") {
  // A kernel whose queue of connections is full drops what comes, as a host that is down does.
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof name;
  auto* generic = reinterpret_cast<sockaddr*>(&name);
  REQUIRE((bind(listener, generic, length) == 0 && listen(listener, 0) == 0));
  REQUIRE(getsockname(listener, generic, &length) == 0);
  std::vector<int> queued;
  for (int i = 0; i < 3; ++i) {
    queued.push_back(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    (void)connect(queued.back(), generic, length);  // goes on beside it
  }
  const auto address = "127.0.0.1 " + std::to_string(ntohs(name.sin_port));
  CHECK(probe({address}, 200ms).front() == Presence::Silent);
  close(listener);
  CHECK(probe({address}, 5s).front() == Presence::Gone);
  for (const int fd : queued) close(fd);
}

TEST_CASE("an interface will do in place of an address", "[comm]") {
  const PresenceSocket socket({{"lo"}, ""});
  CHECK_THAT(socket.address(), ContainsText("127.0.0.1 "));
  CHECK((probe({socket.address()}, 5s).front() == Presence::Present));
}

TEST_CASE("nobody is gone because of an address that says nothing", "[comm][errors]") {
  const std::string address = GENERATE("", "127.0.0.1", "no-number 80", "127.0.0.1 port");
  CHECK((probe({address}, 100ms).front() == Presence::Unknown));
}

TEST_CASE("a socket where there can be none has no address", "[comm][errors]") {
  CHECK(PresenceSocket({{"no-such-interface"}, ""}).address().empty());
  CHECK(PresenceSocket({{}, "192.0.2.1"}).address().empty());  // not this host's
}

TEST_CASE("probing again and again leaves a peer present", "[comm]") {
  const PresenceSocket socket(kLoopback);
  for (int i = 0; i < 4; ++i) {
    const std::vector<std::string> addresses(500, socket.address());
    const auto found = probe(addresses, 30s);
    CHECK((found == std::vector<Presence>(500, Presence::Present)));
    socket.drain();
  }
}
