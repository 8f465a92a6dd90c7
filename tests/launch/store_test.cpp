// c10d's store can listen on the port that ddprun reserves.
#include <chrono>
#include <set>
#include <string>

#include <netinet/in.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/rendezvous/rendezvous.h"
#include "launch/job/ports.h"
#include "launch/options.h"
#include "support/catch.h"
#include "support/listening.h"

using ddp::launch::ReservedPort;

namespace {

c10::intrusive_ptr<c10d::TCPStore> open_store(int port, bool libuv, bool server) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.isServer = server;
  options.waitWorkers = false;
  options.useLibUV = libuv;
  options.timeout = std::chrono::seconds(20);
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

}  // namespace

TEST_CASE("rank 0's store listens on the reserved port, and the others reach it", "[process]") {
  const bool libuv = GENERATE(true, false);
  CAPTURE(libuv);
  const ReservedPort reserved;
  for (int restart = 0; restart < 2; ++restart) {
    const auto server = open_store(reserved.port(), libuv, /*server=*/true);
    CHECK(server->getPort() == reserved.port());
    const c10::intrusive_ptr<c10d::Store> client =
        open_store(reserved.port(), libuv, /*server=*/false);
    client->set("key", "value");
    CHECK(server->get_to_str("key") == "value");
  }
}

TEST_CASE("rank 0 listens on the reserved port on the loopback address alone", "[process]") {
  const ReservedPort reserved;
  ddp::Environment environment;
  environment.rank = ddp::Setting{"RANK", "0"};
  environment.world_size = ddp::Setting{"WORLD_SIZE", "1"};
  environment.master_addr = ddp::Setting{"MASTER_ADDR", ddp::launch::LaunchOptions().master_addr};
  environment.master_port = ddp::Setting{"MASTER_PORT", std::to_string(reserved.port())};
  const ddp::Deadline deadline(std::chrono::seconds(20));
  for (int restart = 0; restart < 2; ++restart) {
    const auto met = ddp::rendezvous({}, environment, deadline);
    CHECK(
        ddp::testing::addresses_listening_on(reserved.port()) ==
        std::set<std::string>{ddp::testing::kLoopback4});
  }
}

TEST_CASE("a store cannot listen on a port on which another store listens", "[process]") {
  const bool libuv = GENERATE(true, false);
  const ReservedPort reserved;
  const auto first = open_store(reserved.port(), libuv, /*server=*/true);
  CHECK_THROWS_WITH(
      open_store(reserved.port(), libuv, /*server=*/true),
      ContainsText("EADDRINUSE") || ContainsText("in use"));
}
