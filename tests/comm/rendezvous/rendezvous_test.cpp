#include "comm/rendezvous/rendezvous.h"

#include <chrono>
#include <fstream>
#include <memory>
#include <set>
#include <thread>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/rendezvous/wait_for_listener.h"
#include "support/error_of.h"
#include "support/listening.h"
#include "support/taken_port.h"
#include "support/warnings.h"

#include "support/catch.h"

using ddp::Environment;
using ddp::ProcessGroupOptions;
using ddp::Setting;
using namespace ddp::testing;

namespace {

// No host's: RFC 5737 reserves it for documentation.
constexpr const char* kNowhere = "192.0.2.1";

Environment launched(const std::string& rank, const std::string& world_size) {
  Environment environment;
  environment.rank = Setting{"RANK", rank};
  environment.world_size = Setting{"WORLD_SIZE", world_size};
  environment.master_addr = Setting{"MASTER_ADDR", "127.0.0.1"};
  environment.address_remedy = "Set MASTER_ADDR and MASTER_PORT.";
  return environment;
}

ddp::Rendezvous rendezvous(const ProcessGroupOptions& options, const Environment& environment) {
  return ddp::rendezvous(options, environment, ddp::Deadline(options.timeout()));
}

ProcessGroupOptions over_store() {
  return ProcessGroupOptions().store(c10::make_intrusive<c10d::HashStore>());
}

}  // namespace

TEST_CASE(
    "rank and world size come from the options before the URL before the environment",
    "[comm][pure][once]") {
  const auto environment = launched("1", "3");
  auto met = rendezvous(over_store(), environment);
  CHECK(met.rank == 1);
  CHECK(met.world_size == 3);

  met = rendezvous(over_store().rank(2), environment);
  CHECK(met.rank == 2);
  CHECK(met.world_size == 3);

  met = rendezvous(over_store().rank(0).world_size(1), {});
  CHECK(met.rank == 0);
  CHECK(met.world_size == 1);

  // The environment is not needed here, so a malformed one is no error.
  met = rendezvous(over_store().rank(0).world_size(1), launched("abc", "0"));
  CHECK(met.world_size == 1);
}

TEST_CASE("a process without a launcher is a world of one", "[comm][pure][once]") {
  Environment alone;
  alone.no_launcher = true;
  const auto met = rendezvous({}, alone);
  CHECK(met.rank == 0);
  CHECK(met.world_size == 1);
  REQUIRE(met.store);
  // If any setting refers to other processes, the remaining settings are required, too.
  CHECK_THROWS_WITH(
      rendezvous(over_store(), alone), ContainsText("expected WORLD_SIZE in the environment"));
  CHECK_THROWS_WITH(
      rendezvous(ProcessGroupOptions().rank(0), alone),
      ContainsText("expected WORLD_SIZE in the environment"));
  CHECK_THROWS_WITH(
      rendezvous(ProcessGroupOptions().init_method("tcp://127.0.0.1:29500"), alone),
      ContainsText("expected WORLD_SIZE in the environment"));
  CHECK_THROWS_WITH(
      rendezvous(ProcessGroupOptions().init_method("env://?rank=0"), alone),
      ContainsText("expected WORLD_SIZE in the environment"));
}

// A launcher's job may run several such programs at once: all of them would listen at the port that
// is derived from the job.
TEST_CASE("a process that a launcher has started alone needs no address", "[comm][pure][once]") {
  auto environment = launched("0", "1");
  const TakenPort taken;
  environment.master_addr = Setting{"SLURM_STEP_NODELIST", "127.0.0.1"};
  environment.master_port = Setting{"SLURM_JOB_ID", std::to_string(taken.number())};
  const auto met = rendezvous({}, environment);
  CHECK(met.world_size == 1);
  CHECK(c10::dynamic_intrusive_pointer_cast<c10d::HashStore>(met.store));
  environment.master_addr.reset();
  CHECK(rendezvous({}, environment).store);

  // Others may look for the store where MASTER_ADDR says.
  environment.master_addr = Setting{"MASTER_ADDR", "127.0.0.1"};
  environment.master_port.reset();
  CHECK_THROWS_WITH(rendezvous({}, environment), Catch::Contains("expected MASTER_PORT"));
}

TEST_CASE("a process that may be one of several warns", "[comm][pure][once]") {
  Environment first;
  first.no_launcher = true;
  const Warnings quiet;
  CHECK(rendezvous({}, first).world_size == 1);
  CHECK(quiet.texts.empty());
  first.doubt = "JOB_COMPLETION_INDEX";
  const Warnings warnings;
  CHECK(rendezvous({}, first).world_size == 1);
  CHECK(warnings.count("JOB_COMPLETION_INDEX") == 1);
}

TEST_CASE(
    "a process that is one of several without a number is an error", "[comm][pure][errors][once]") {
  Environment one;
  one.problem = "there are others";
  CHECK_THROWS_WITH(rendezvous({}, one), ContainsText("there are others"));
  // The options say what the environment does not.
  CHECK(rendezvous(over_store().rank(1).world_size(2), one).rank == 1);
}

TEST_CASE("a bad setting is an error that names it and its value", "[comm][pure][errors][once]") {
  const auto message_of = [](const ProcessGroupOptions& options, const Environment& environment) {
    try {
      rendezvous(options, environment);
    } catch (const c10::ValueError& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string("no error");
  };
  using Catch::Matchers::Equals;

  CHECK_THAT(
      message_of(over_store(), launched("abc", "2")),
      Equals("RANK: expected a whole number of at least 0, got \"abc\". Correct it, or start the "
             "program with ddprun, torchrun, mpirun or srun, which set it."));
  CHECK_THAT(
      message_of(over_store(), launched("1 ", "2")), ContainsText("RANK: expected a whole number"));
  CHECK_THAT(
      message_of(over_store(), launched("-1", "2")),
      ContainsText("RANK: expected a number of at least 0, got \"-1\". Correct it"));
  CHECK_THAT(
      message_of(over_store(), launched("0", "0")),
      ContainsText("WORLD_SIZE: expected a number of at least 1, got \"0\". Correct it"));
  CHECK_THAT(
      message_of(over_store(), launched("0", "99999999999999999999")),
      ContainsText("WORLD_SIZE: expected a whole number"));
  CHECK_THAT(
      message_of(over_store(), launched("2", "2")),
      Equals("RANK: expected a rank from 0 to 1, for WORLD_SIZE is 2, got 2. Ranks count from 0: "
             "give each of the 2 processes its own, or correct WORLD_SIZE."));
  CHECK_THAT(
      message_of(over_store().rank(3), launched("0", "2")),
      ContainsText("rank(): expected a rank from 0 to 1, for WORLD_SIZE is 2, got 3"));
  const auto in_url = ProcessGroupOptions().init_method("file:///meet?rank=2&world_size=2");
  CHECK_THAT(
      message_of(in_url, {}),
      ContainsText("rank in init_method(\"file:///meet?rank=2&world_size=2\"): expected a rank "
                   "from 0 to 1, for world_size in"));
  CHECK_THAT(
      message_of(ProcessGroupOptions().init_method("file:///meet?rank=x&world_size=2"), {}),
      ContainsText("): expected a whole number of at least 0, got \"x\". End the URL with ?rank="));
  CHECK_THAT(
      message_of(over_store().rank(-7), launched("0", "2")),
      ContainsText("rank(): expected a number of at least 0, got \"-7\". Correct it, or leave it"));
  CHECK_THAT(
      message_of(over_store(), {}),
      ContainsText("expected WORLD_SIZE in the environment, got nothing") &&
          ContainsText("ddprun") && ContainsText("world_size()"));
  CHECK_THAT(
      message_of(over_store().world_size(2), {}), ContainsText("expected RANK in the environment"));
  auto half = launched("1", "2");
  half.world_size.reset();
  half.sign = half.rank;
  CHECK_THAT(
      message_of(over_store(), half),
      ContainsText(
          "expected WORLD_SIZE in the environment, got nothing, while RANK is \"1\". Start"));
  CHECK_THAT(
      message_of(over_store().timeout(std::chrono::milliseconds(0)), launched("0", "1")),
      ContainsText("timeout(): expected more than 0 ms, got 0 ms. Give what the slowest rank"));
  CHECK_THAT(
      message_of({}, launched("0", "1")),
      ContainsText("expected MASTER_PORT in the environment, got nothing on rank 0 of 1. Set "
                   "MASTER_ADDR and"));
  auto bad_port = launched("0", "1");
  bad_port.master_port = Setting{"MASTER_PORT", "70000"};
  CHECK_THAT(
      message_of({}, bad_port),
      Equals("MASTER_PORT: expected a number from 1 to 65535, got \"70000\" on rank 0 of 1. Set it "
             "to a free port of rank 0's host, the same for all ranks."));
}

TEST_CASE(
    "a restart over torchrun's store does not see the previous attempt's keys",
    "[comm][ranks][once]") {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const auto agent = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  auto environment = launched("0", "2");
  environment.master_port = Setting{"MASTER_PORT", std::to_string(agent->getPort())};
  environment.agent_store = true;
  const auto meet = [&](const char* attempt) {
    environment.attempt = Setting{"TORCHELASTIC_RESTART_COUNT", attempt};
    return rendezvous(ProcessGroupOptions().timeout(std::chrono::seconds(20)), environment);
  };
  meet("0").store->set("claim", std::string("stale"));
  const auto again = meet("1");
  CHECK_FALSE(again.store->check({"claim"}));
  CHECK(again.host == "127.0.0.1");
  CHECK(meet("0").store->check({"claim"}));
}

TEST_CASE("at a loopback address rank 0 listens on that address only", "[comm][once]") {
  const auto [host, address] = GENERATE(table<const char*, const char*>(
      {{"127.0.0.1", kLoopback4}, {"localhost", kLoopback4}, {"::1", kLoopback6}}));
  CAPTURE(host);
  if (address == kLoopback6 && !std::ifstream("/proc/net/if_inet6").good()) return;
  auto environment = launched("0", "1");
  environment.master_addr = Setting{"MASTER_ADDR", host};
  const int port = free_port();
  environment.master_port = Setting{"MASTER_PORT", std::to_string(port)};
  const auto options = ProcessGroupOptions().timeout(std::chrono::seconds(20));
  const auto met = rendezvous(options, environment);
  CHECK(addresses_listening_on(port) == std::set<std::string>{address});
  CHECK(
      met.store_host ==
      "which rank 0 hosts at " + std::string(host) + " port " + std::to_string(port));
  // A second group of this process shares the store.
  met.store->set("key", std::string("value"));
  CHECK(rendezvous(options, environment).store->get_to_str("key") == "value");
}

TEST_CASE("at any other address rank 0 listens on all addresses of the host", "[comm][once]") {
  auto environment = launched("0", "1");
  environment.master_addr = Setting{"MASTER_ADDR", "0.0.0.0"};
  const int port = free_port();
  environment.master_port = Setting{"MASTER_PORT", std::to_string(port)};
  const auto met = rendezvous(ProcessGroupOptions().timeout(std::chrono::seconds(20)), environment);
  const auto addresses = addresses_listening_on(port);
  CHECK(addresses.count(kLoopback4) == 0);
  CHECK(addresses.count(kLoopback6) == 0);
  CHECK(addresses.size() == 1);
}

TEST_CASE("a taken port is an error on rank 0 that names it", "[comm][errors][once]") {
  const TakenPort port;
  auto environment = launched("0", "2");
  environment.master_port = Setting{"MASTER_PORT", std::to_string(port.number())};
  CHECK_THROWS_WITH(
      rendezvous(ProcessGroupOptions().timeout(std::chrono::seconds(2)), environment),
      ContainsText("expected rank 0 to listen on port " + std::to_string(port.number())) &&
          ContainsText("choose another MASTER_PORT"));
}

TEST_CASE("rank 0 waits for a port that is about to be free", "[comm][once]") {
  auto port = std::make_unique<TakenPort>();  // an earlier rank 0, which ends soon
  auto environment = launched("0", "2");
  environment.master_port = Setting{"MASTER_PORT", std::to_string(port->number())};
  std::thread earlier([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(700));
    port.reset();
  });
  const auto join = c10::make_scope_exit([&] { earlier.join(); });
  const auto met = rendezvous(ProcessGroupOptions().timeout(std::chrono::seconds(20)), environment);
  CHECK(met.rank == 0);
}

TEST_CASE("a missing rank 0 is an error that names its host and port", "[comm][errors][once]") {
  // The port was taken and is released, so nothing listens there.
  const int port = free_port();
  auto environment = launched("1", "2");
  environment.master_port = Setting{"MASTER_PORT", std::to_string(port)};
  const auto start = std::chrono::steady_clock::now();
  CHECK_THROWS_WITH(
      rendezvous(ProcessGroupOptions().timeout(std::chrono::seconds(2)), environment),
      ContainsText("expected rank 0 to answer at 127.0.0.1 port " + std::to_string(port)) &&
          ContainsText("within 2000 ms, but rank 1 of 2 did not reach it"));
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
}

TEST_CASE(
    "a host that does not resolve is an error that names it, on rank 0 too",
    "[comm][errors][once]") {
  const auto rank = GENERATE("0", "1");
  auto environment = launched(rank, "2");
  environment.master_addr = Setting{"MASTER_ADDR", "no-such-host.invalid"};
  environment.master_port = Setting{"MASTER_PORT", std::to_string(free_port())};
  const auto start = std::chrono::steady_clock::now();
  CHECK_THROWS_WITH(
      rendezvous(ProcessGroupOptions().timeout(std::chrono::milliseconds(300)), environment),
      ContainsText(
          "expected an address for the host \"no-such-host.invalid\", got none on rank ") &&
          ContainsText(" of 2: ") && ContainsText("MASTER_ADDR"));
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
}

TEST_CASE("a host that does not resolve is an error before the deadline", "[comm][errors][once]") {
  // No valid name has an empty label, so no name server is queried.
  const ddp::Deadline deadline(std::chrono::seconds(20));
  const auto start = std::chrono::steady_clock::now();
  CHECK_FALSE(ddp::wait_for_address("no..host", deadline, std::chrono::milliseconds(200)).empty());
  const auto took = std::chrono::steady_clock::now() - start;
  CHECK(took >= std::chrono::milliseconds(200));
  CHECK(took < std::chrono::seconds(5));
  CHECK(ddp::wait_for_address("127.0.0.1", deadline).empty());
  // In Kubernetes a pod gets its name when a node has room for it.
  CHECK(ddp::unknown_host_timeout(false, deadline) == ddp::kUnknownHostTimeout);
  CHECK(ddp::unknown_host_timeout(true, deadline) == std::chrono::seconds(20));
}

TEST_CASE("addresses that no interface of this host has are elsewhere", "[comm][once]") {
  const ddp::Deadline deadline(std::chrono::seconds(20));
  CHECK(ddp::addresses_elsewhere("127.0.0.1", deadline).empty());
  CHECK(ddp::addresses_elsewhere("no..host", deadline).empty());
  CHECK(ddp::addresses_elsewhere(kNowhere, deadline) == std::vector<std::string>{kNowhere});
}

TEST_CASE("a rank 0 that is not at MASTER_ADDR is an error in time", "[comm][errors][once]") {
  auto environment = launched("0", "2");
  environment.master_addr = Setting{"MASTER_ADDR", kNowhere};
  environment.master_port = Setting{"MASTER_PORT", std::to_string(free_port())};
  const auto start = std::chrono::steady_clock::now();
  const auto text = ddp::testing::error_of<c10::Error>(
      [&] { rendezvous(ProcessGroupOptions().timeout(std::chrono::seconds(2)), environment); });
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
  CHECK_THAT(
      text, ContainsText("expected rank 0 on the host of MASTER_ADDR (or tcp://), \"192.0.2.1\"") &&
                ContainsText(" on rank 0 of 2, and nothing answers there at port ") &&
                ContainsText("Start rank 0 on that host"));
  CHECK(text.find("Exception raised from") == std::string::npos);
}

TEST_CASE("a file that cannot be created is an error that names it", "[comm][errors][once]") {
  const auto options = ProcessGroupOptions()
                           .init_method("file:///no/such/folder/meet")
                           .rank(0)
                           .world_size(1)
                           .timeout(std::chrono::seconds(2));
  CHECK_THROWS_WITH(
      rendezvous(options, {}),
      ContainsText(
          "expected to open or create /no/such/folder/meet for file://, but cannot on rank 0 of 1: "
          "/no/such/folder/meet.users: No such file or directory. Give a path"));
}
