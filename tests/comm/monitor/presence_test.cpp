// Detects by its listening socket whether a peer still exists.
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/monitor/liveness_socket.h"

#include "support/catch.h"

using namespace std::chrono_literals;
using ddp::GlooDevices;
using ddp::Liveness;
using ddp::LivenessSocket;
using ddp::probe;

namespace {

const GlooDevices kLoopback{{}, "127.0.0.1"};

}  // namespace

TEST_CASE("a peer is alive while its socket exists", "[comm][errors]") {
  const LivenessSocket lives(kLoopback);
  auto ends = std::make_unique<LivenessSocket>(kLoopback);
  const std::vector<std::string> addresses{lives.address(), ends->address()};
  CHECK((probe(addresses, 5s) == std::vector<Liveness>{Liveness::Alive, Liveness::Alive}));
  ends.reset();
  CHECK((probe(addresses, 5s) == std::vector<Liveness>{Liveness::Alive, Liveness::Gone}));
}

TEST_CASE("a process that a peer forked does not count as the peer", "[comm][errors]") {
  auto socket = std::make_unique<LivenessSocket>(kLoopback);
  const auto address = socket->address();
  int lives[2], runs[2];
  REQUIRE((pipe(lives) == 0 && pipe(runs) == 0));
  const auto child = fork();
  char byte = 0;
  if (child == 0) {
    close(lives[1]);
    const auto written = write(runs[1], &byte, 1);
    // read() returns when the parent closes its end.
    _exit(static_cast<int>(written - 1 + read(lives[0], &byte, 1)));
  }
  close(lives[0]);
  REQUIRE(read(runs[0], &byte, 1) == 1);
  CHECK(probe({address}, 5s).front() == Liveness::Alive);
  socket.reset();
  CHECK(probe({address}, 5s).front() == Liveness::Gone);
  for (const int end : {lives[1], runs[0], runs[1]}) close(end);
  waitpid(child, nullptr, 0);
}

TEST_CASE("an address at which no host answers is silent", "[comm][errors]") {
  // A kernel whose queue of connections is full drops further ones, like a host that is down.
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
    (void)connect(queued.back(), generic, length);  // continues in the background
  }
  const auto address = "127.0.0.1 " + std::to_string(ntohs(name.sin_port));
  CHECK(probe({address}, 200ms).front() == Liveness::Silent);
  close(listener);
  CHECK(probe({address}, 5s).front() == Liveness::Gone);
  for (const int fd : queued) close(fd);
}

TEST_CASE("a socket can listen on an interface instead of an address", "[comm]") {
  const LivenessSocket socket({{"lo"}, ""});
  CHECK_THAT(socket.address(), ContainsText("127.0.0.1 "));
  CHECK((probe({socket.address()}, 5s).front() == Liveness::Alive));
}

TEST_CASE("a malformed address is unknown, not gone", "[comm][errors]") {
  const std::string address = GENERATE("", "127.0.0.1", "no-number 80", "127.0.0.1 port");
  CHECK((probe({address}, 100ms).front() == Liveness::Unknown));
}

TEST_CASE("a socket that cannot listen has no address", "[comm][errors]") {
  CHECK(LivenessSocket({{"no-such-interface"}, ""}).address().empty());
  CHECK(LivenessSocket({{}, "192.0.2.1"}).address().empty());  // not this host's
}

TEST_CASE("a peer is still alive after many probes", "[comm]") {
  const LivenessSocket socket(kLoopback);
  for (int i = 0; i < 4; ++i) {
    const std::vector<std::string> addresses(500, socket.address());
    const auto found = probe(addresses, 30s);
    CHECK((found == std::vector<Liveness>(500, Liveness::Alive)));
    socket.drain();
  }
}
