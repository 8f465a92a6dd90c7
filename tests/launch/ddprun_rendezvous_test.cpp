// Hosts that get their numbers as they come: several ddpruns on the loopback device.
#include <string>
#include <vector>

#include <ddp/internal/membership/address.h>

#include "launch/job/ports.h"
#include "support/processes.h"

#include "support/catch.h"

using namespace ddp::testing;
using ddp::launch::ReservedPort;
using Words = std::vector<std::string>;

namespace {

/// The command of one of three hosts, each with its own number of ranks.
Words host(
    const ReservedPort& endpoint, const std::string& ranks, const std::string& id,
    const std::string& script) {
  return ddprun_sh(
      {"--nproc_per_node", ranks, "--nnodes", "3", "--rdzv_backend", "c10d", "--rdzv_id", id,
       "--rdzv_endpoint", "localhost:" + std::to_string(endpoint.port())},
      script);
}

}  // namespace

TEST_CASE("hosts without numbers get them, and their ranks are one world", "[process]") {
  const ReservedPort endpoint;
  const std::string script =
      "echo rank $RANK of $WORLD_SIZE node $GROUP_RANK of $GROUP_WORLD_SIZE port $MASTER_PORT";
  Process one(host(endpoint, "1", "j", script)), two(host(endpoint, "2", "j", script)),
      three(host(endpoint, "3", "j", script));
  std::string out;
  for (auto* process : {&one, &two, &three}) {
    const Ended ended = process->wait();
    CAPTURE(ended.err);
    CHECK(ended.code == 0);
    CHECK(ended.err.empty());
    out += ended.out;
    // The ranks of a host follow each other.
    const auto nodes = numbers_after(ended.out, " node ");
    CHECK(nodes == std::vector<int>(nodes.size(), nodes.front()));
  }
  CAPTURE(out);
  CHECK(sorted_lines(out).size() == 6);
  for (int rank = 0; rank < 6; ++rank) {
    CHECK_THAT(
        out, ContainsText(
                 "[" + std::to_string(rank) + "] rank " + std::to_string(rank) + " of 6 node "));
  }
  for (int node = 0; node < 3; ++node) {
    CHECK_THAT(out, ContainsText(" node " + std::to_string(node) + " of 3"));
  }
  const auto ports = numbers_after(out, " port ");
  CHECK(ports == std::vector<int>(6, ports.front()));
}

TEST_CASE("a host with another --rdzv-id is refused, and the others begin", "[process]") {
  const ReservedPort endpoint;
  Process first(host(endpoint, "1", "j", "exit 0"));
  // The first to listen is node 0, so it has to be there before a stranger.
  REQUIRE(eventually([&] {
    return static_cast<bool>(ddp::membership::connect_to("127.0.0.1", endpoint.port()));
  }));
  const Ended stranger = run(host(endpoint, "1", "other", "exit 0"));
  CHECK(stranger.code == 1);
  CHECK_THAT(
      stranger.err, ContainsText("ddprun: --rdzv-id: expected that of the job at this endpoint, or "
                                 "its --token, got 'other'. Give all hosts of a job the same"));
  Process second(host(endpoint, "1", "j", "exit 0")), third(host(endpoint, "1", "j", "exit 0"));
  CHECK(first.wait().code == 0);
  CHECK(second.wait().code == 0);
  CHECK(third.wait().code == 0);
}

TEST_CASE(
    "a program that has the endpoint's port and says nothing is no first host",
    "[process][errors]") {
  const auto other = ddp::launch::listen_on(0);
  const auto ended = run(ddprun_sh(
      {"-n", "1", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-conf",
       "join_timeout=1,is_host=0", "--rdzv-endpoint",
       "127.0.0.1:" + std::to_string(ddp::launch::port_of(other))},
      "exit 0"));
  CHECK(ended.code == 1);
  CHECK_THAT(
      ended.err, ContainsText("got no word from there in 2 s. Another program may have the port"));
}

TEST_CASE("a failure on a host without a number ends the ranks of all", "[process]") {
  const ReservedPort endpoint;
  const std::string script = "[ $RANK = 2 ] && exit 9; exec sleep 100";
  Process one(host(endpoint, "1", "j", script)), two(host(endpoint, "1", "j", script)),
      three(host(endpoint, "1", "j", script));
  for (auto* process : {&one, &two, &three}) CHECK(process->wait().code == 9);
}
