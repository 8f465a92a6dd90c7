#include "rendezvous/rendezvous.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <optional>
#include <string_view>
#include <thread>

#include <c10/util/Logging.h>
#include <ddp/internal/check.h>
#include <ddp/internal/system/host.h>
#include <ddp/internal/text.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/executor.h"
#include "base/network_interface.h"
#include "base/socket_address.h"
#include "rendezvous/init_method.h"
#include "rendezvous/wait_for_listener.h"
#include "store/shared_file_store.h"
#include "store/tcp_store.h"

namespace ddp {
namespace {

// Time for the first answer to arrive.
constexpr auto kAnswerGrace = std::chrono::seconds(1);

// Connections that rank 0's host accepts at once: an eighth of Linux's usual backlog.
constexpr int kMostAtOnce = 512;

struct RankAndSize {
  int rank;
  int world_size;
};

std::string to_text(const RankAndSize& self) {
  return ddp::str(" on rank ", self.rank, " of ", self.world_size);
}

struct Number {
  std::string name;
  int value;
};

// Returns the option, else the value in the URL's query, else the environment's.
Number resolve(
    const char* option_name, int option, const std::optional<Setting>& in_url,
    const std::optional<Setting>& in_environment, const std::string& variable, int min,
    const Environment& environment) {
  if (option != -1) {
    const char* remedy =
        "Correct it, or leave it out where a launcher has set RANK and WORLD_SIZE.";
    return {option_name, parse_int({option_name, std::to_string(option)}, {min}, remedy)};
  }
  if (in_url) {
    const char* remedy = "End the URL with ?rank=R&world_size=W, this process's numbers.";
    return {in_url->name, parse_int(*in_url, {min}, remedy)};
  }
  DDP_CHECK_VALUE(environment.problem.empty(), environment.problem);
  const auto& sign = environment.sign;
  DDP_CHECK_VALUE(
      in_environment.has_value(), "init_process_group: expected ", variable,
      " in the environment, got nothing",
      sign ? ddp::str(", while ", sign->name, " is \"", sign->value, "\"") : "",
      ". Start the program with ddprun, torchrun, mpirun or srun, or set ", option_name,
      " in the options.");
  return {in_environment->name, parse_int(*in_environment, {min}, kLauncherRemedy)};
}

RankAndSize resolve_rank(
    const ProcessGroupOptions& options, const InitMethod& method, const Environment& environment) {
  const auto world_size = resolve(
      "world_size()", options.world_size(), method.world_size, environment.world_size,
      environment.world_size_name, 1, environment);
  const auto rank = resolve(
      "rank()", options.rank(), method.rank, environment.rank, environment.rank_name, 0,
      environment);
  DDP_CHECK_VALUE(
      rank.value < world_size.value, rank.name, ": expected a rank from 0 to ",
      world_size.value - 1, ", for ", world_size.name, " is ", world_size.value, ", got ",
      rank.value, ". Ranks count from 0: give each of the ", world_size.value,
      " processes its own, or correct ", world_size.name, ".");
  return {rank.value, world_size.value};
}

// The address of a TCPStore, and which process listens there.
struct StoreAddress {
  std::string host;
  int port;
  bool agent_listens;
  bool names_come_late = false;             // the host may get its name while the ranks wait
  std::vector<std::string> elsewhere = {};  // its addresses, if this host has none of them
  std::string number = "";                  // its address that the store is reached at

  const char* listener() const { return agent_listens ? "torchrun's agent" : "rank 0"; }
};

void check_host(const StoreAddress& address, const RankAndSize& self, const Deadline& deadline) {
  const auto& host = address.host;
  const auto problem =
      wait_for_address(host, deadline, unknown_host_timeout(address.names_come_late, deadline));
  DDP_CHECK(
      problem.empty(), "init_process_group: expected an address for the host \"", host,
      "\", got none", to_text(self), ": ", problem,
      ". Check its spelling in MASTER_ADDR (or tcp://), and that this host can resolve it.");
  const bool is_missing = is_loopback(ddp::parse_address(host, "9").get()) && !has_address(host);
  DDP_CHECK(
      !is_missing, "init_process_group: expected an address that a loopback interface has, got ",
      host, to_text(self), ", which this one lacks. Set MASTER_ADDR (or the host in tcp://) to ",
      loopback_address(), ", or bring the interface up (ip link set lo up).");
}

using StorePtr = c10::intrusive_ptr<c10d::Store>;

StorePtr open_server_once(const StoreAddress& address, c10d::TCPStoreOptions options) {
  options.isServer = true;
  if (!address.elsewhere.empty()) {
    return open_tcp_store(loopback_address(), options);
  }
  auto listener = listen_on_loopback(address.host, address.port);
  if (listener) options.masterListenFd = listener.release();
  return open_tcp_store(address.number, options);
}

// An earlier rank 0 that is about to end may still have the port.
StorePtr open_server(
    const StoreAddress& address, const c10d::TCPStoreOptions& options, const Deadline& deadline) {
  constexpr std::chrono::seconds kPortTimeout(3);
  constexpr std::chrono::milliseconds kRetryInterval(50);
  const Deadline latest(std::min<std::chrono::milliseconds>(kPortTimeout, deadline.left() / 2));
  for (;;) {
    try {
      return open_server_once(address, options);
    } catch (const std::exception& error) {
      const bool is_taken =
          std::string_view(error.what()).find("EADDRINUSE") != std::string_view::npos;
      if (!is_taken || latest.passed()) throw;
    }
    std::this_thread::sleep_for(kRetryInterval);
  }
}

/// Finds a rank 0 that is not where the others look for it. MASTER_ADDR may lead to this host
/// although none of its interfaces has the address, as a service's or a router's; then something
/// answers.
void check_leads_here(
    const StoreAddress& address, const RankAndSize& self, const Deadline& deadline) {
  constexpr std::chrono::milliseconds kRefusedWithin(2000);
  const std::string refused = std::strerror(ECONNREFUSED);
  // A service refuses until it has found this process.
  const auto first = address.names_come_late ? deadline.left() : kRefusedWithin;
  auto problem =
      wait_for_listener(address.host, address.port, Deadline(std::min(first, deadline.left())));
  if (!problem.empty() && problem != refused) {
    problem = wait_for_listener(address.host, address.port, deadline);
  }
  DDP_CHECK(
      problem.empty(),
      "init_process_group: expected rank 0 on the host of MASTER_ADDR (or tcp://), \"",
      address.host, "\" with ", joined_by(", ", address.elsewhere), ", got a host with ",
      joined_by(", ", own_addresses()), to_text(self), ", and nothing answers there at port ",
      address.port, ": ", problem,
      ". Start rank 0 on that host (--node-rank 0, or the first in the list of hosts), or set "
      "MASTER_ADDR to an address of this one.");
}

// Bounded, because TCPStore's constructor waits for the listener's first answer without a limit.
StorePtr open_client(
    const StoreAddress& address, const c10d::TCPStoreOptions& options, const Deadline& deadline) {
  const auto store = bounded_call(
      [host = address.number, options] { return open_tcp_store(host, options); },
      Deadline::in(deadline.left()) + kAnswerGrace);
  DDP_CHECK(store, address.listener(), " took the connection and did not answer");
  return *store;
}

// TCPStore's errors quote those of their attempts, stack traces included.
std::string without_trace(const std::string& problem) {
  return problem.substr(0, problem.find("\nException raised from"));
}

StorePtr make_tcp_store(StoreAddress address, const RankAndSize& self, const Deadline& deadline) {
  check_host(address, self, deadline);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(address.port);
  options.waitWorkers = false;  // the startup barrier waits, and names the missing ranks
  // If numWorkers is set, TCPStore sleeps up to a millisecond per rank, to stagger the connections.
  if (self.world_size > kMostAtOnce) options.numWorkers = static_cast<size_t>(self.world_size);
  options.multiTenant = true;
  const bool listens = self.rank == 0 && !address.agent_listens;
  if (listens) address.elsewhere = addresses_elsewhere(address.host, deadline);
  if (listens) address.number = own_address_in_numbers(address.host, deadline);
  if (address.number.empty()) address.number = address.host;
  StorePtr store;
  const auto problem = problem_of([&] {
    if (!listens) {
      const auto unreachable =
          wait_for_listener(address.host, address.port, deadline, &address.number);
      DDP_CHECK(unreachable.empty(), unreachable);
    }
    options.timeout = deadline.left();
    store =
        listens ? open_server(address, options, deadline) : open_client(address, options, deadline);
    store->setTimeout(deadline.timeout());
  });
  DDP_CHECK(
      store || !listens, "init_process_group: expected rank 0 to listen on port ", address.port,
      ", but it cannot: ", without_trace(problem),
      ". If another program has the port, choose another MASTER_PORT (or tcp:// port).");
  const bool is_here = !store && addresses_elsewhere(address.host, deadline).empty();
  DDP_CHECK(
      store, "init_process_group: expected ", address.listener(), " to answer at ", address.host,
      " port ", address.port, " within ", deadline.timeout().count(), " ms, but rank ", self.rank,
      " of ", self.world_size, " did not reach it: ", without_trace(problem), ". Check that ",
      address.listener(), is_here ? " runs on this host, which has that address," : " runs,",
      " and that host and port (MASTER_ADDR and MASTER_PORT, or tcp://) are right.");
  if (listens && !address.elsewhere.empty()) check_leads_here(address, self, deadline);
  return store;
}

// Tries each address for a while, again and again: those of other networks may never answer.
std::string first_that_listens(
    const std::vector<std::string>& addresses, int port, const Deadline& deadline) {
  constexpr std::chrono::milliseconds kEach(500);
  std::string problem;
  do {
    for (const auto& address : addresses) {
      const Deadline try_until(std::min<std::chrono::milliseconds>(kEach, deadline.left()));
      problem = wait_for_listener(address, port, try_until);
      if (problem.empty()) return address;
    }
  } while (!deadline.passed());
  DDP_CHECK(
      false, "init_process_group: expected rank 0 to answer at port ", port, " of one of ",
      joined_by(", ", addresses), " within ", deadline.timeout().count(),
      " ms, but none does: ", problem,
      ". Check that this host reaches rank 0's, or set MASTER_ADDR and MASTER_PORT.");
}

StorePtr make_file_store(
    const std::string& path, const RankAndSize& self, const Deadline& deadline) {
  std::optional<StorePtr> store;
  const auto problem = problem_of([&] {
    // Bounded, because locking a file has no limit.
    store = bounded_call(
        [path]() -> StorePtr { return c10::make_intrusive<SharedFileStore>(path); },
        Deadline::in(deadline.left()) + kAnswerGrace);
    DDP_CHECK(store, "another process has locked it for ", deadline.timeout().count(), " ms");
  });
  DDP_CHECK(
      problem.empty(), "init_process_group: expected to open or create ", path,
      " for file://, but cannot", to_text(self), ": ", problem,
      ". Give a path in a folder that exists and that every rank may write to.");
  (*store)->setTimeout(deadline.timeout());
  return *store;
}

// Rank 0 listens at a port that is free, and MPI tells the others which, and its host's addresses.
Rendezvous meet_over_mpi(
    const ProcessGroupOptions& options, const Environment& environment, const Deadline& deadline) {
  auto* mpi = mpi_meeting();
  DDP_CHECK(
      mpi != nullptr,
      "init_method(\"mpi://\"): expected a program that is linked with ddp::mpi, got one without. "
      "Add "
      "it to target_link_libraries (ddp must be built with -DDDP_WITH_MPI=ON), or use env://.");
  const auto place = mpi->start(deadline);
  const RankAndSize self{place.rank, place.world_size};
  // MPI makes a world of one of a process that no launcher of its kind has started.
  DDP_CHECK_VALUE(self.world_size > 1 || environment.problem.empty(), environment.problem);
  DDP_CHECK_VALUE(
      (options.rank() == -1 || options.rank() == self.rank) &&
          (options.world_size() == -1 || options.world_size() == self.world_size),
      "backend mpi: expected rank() and world_size() to be MPI's, ", self.rank, " of ",
      self.world_size, ", got ", options.rank(), " of ", options.world_size(), ". Leave them out.");
  Rendezvous result;
  result.rank = self.rank;
  result.world_size = self.world_size;
  result.hosting_rank = 0;
  std::string place_of_store;
  if (self.rank == 0) {
    c10d::TCPStoreOptions store;
    store.isServer = true;
    store.port = 0;  // a free one
    store.waitWorkers = false;
    store.timeout = deadline.left();
    const auto server = open_tcp_store(loopback_address(), store);
    server->setTimeout(deadline.timeout());
    place_of_store = std::to_string(tcp_store_of(*server)->getPort());
    for (const auto& address : own_addresses()) place_of_store += ' ' + address;
    result.store = server;
  }
  InputText text(mpi->broadcast(place_of_store, deadline));
  int port = 0;
  text >> port;
  std::vector<std::string> addresses;
  for (std::string address; text >> address;) addresses.push_back(address);
  result.host = self.rank == 0 ? addresses.front() : first_that_listens(addresses, port, deadline);
  if (self.rank != 0) result.store = make_tcp_store({result.host, port, false}, self, deadline);
  result.store_host = ddp::str("which rank 0 hosts at ", result.host, " port ", port);
  return result;
}

const Setting& require_setting(
    const std::optional<Setting>& setting, const char* name, const Environment& environment,
    const RankAndSize& self) {
  DDP_CHECK_VALUE(
      setting.has_value(), "init_process_group: expected ", name,
      " in the environment, got nothing", to_text(self), ". ", environment.address_remedy);
  return *setting;
}

// Whether no setting at all names other processes.
bool names_no_others(
    const ProcessGroupOptions& options, const InitMethod& method, const Environment& environment) {
  return environment.no_launcher && !options.store() && method.kind == InitMethod::Kind::kEnv &&
         options.rank() == -1 && options.world_size() == -1 && !method.rank && !method.world_size;
}

// Whether a launcher has started this process alone. Then an address that was derived from the job
// is of no use, and two such programs of a job would derive the same port.
bool needs_no_address(
    const RankAndSize& self, const ProcessGroupOptions& options, const InitMethod& method,
    const Environment& environment) {
  const auto& address = environment.master_addr;
  return self.world_size == 1 && !options.store() && method.kind == InitMethod::Kind::kEnv &&
         !(address && address->name == "MASTER_ADDR");
}

Rendezvous world_of_one() {
  Rendezvous result;
  result.store = c10::make_intrusive<c10d::HashStore>();
  result.store_host = "which this process holds";
  result.hosting_rank = 0;
  return result;
}

}  // namespace

MpiMeeting*& mpi_meeting() {
  static MpiMeeting* meeting = nullptr;
  return meeting;
}

Rendezvous rendezvous(
    const ProcessGroupOptions& options, const Environment& environment, const Deadline& deadline) {
  DDP_CHECK_VALUE(
      options.timeout().count() > 0, "timeout(): expected more than 0 ms, got ",
      options.timeout().count(),
      " ms. Give what the slowest rank may take, or leave it out for 30 "
      "minutes.");
  const auto method = options.store() ? InitMethod{} : parse_init_method(options.init_method());
  if (method.kind == InitMethod::Kind::kMpi) return meet_over_mpi(options, environment, deadline);
  if (names_no_others(options, method, environment)) {
    if (!environment.doubt.empty()) TORCH_WARN(environment.doubt);
    LOG(INFO) << "init_process_group: no launcher has started this process, so it is a world of "
                 "one rank. ddprun, torchrun, mpirun and srun start several.";
    return world_of_one();
  }
  const auto self = resolve_rank(options, method, environment);
  if (needs_no_address(self, options, method, environment)) return world_of_one();
  Rendezvous result;
  result.rank = self.rank;
  result.world_size = self.world_size;
  if (options.store()) {
    result.store = options.store();
    result.store_host = "which store() names";
    if (const auto* tcp = tcp_store_of(*options.store())) {
      result.host = tcp->getHost();
      result.store_host = ddp::str("which listens at ", tcp->getHost(), " port ", tcp->getPort());
    }
  } else if (method.kind == InitMethod::Kind::kFile) {
    result.store = make_file_store(method.path, self, deadline);
    result.store_host = "which is the file " + method.path;
  } else {
    const bool from_environment = method.kind == InitMethod::Kind::kEnv;
    result.host = method.host;
    auto port = method.port;
    if (from_environment) {
      result.host =
          require_setting(environment.master_addr, "MASTER_ADDR", environment, self).value;
      auto port_setting = environment.master_port;
      if (!port_setting && environment.launcher_socket) {
        port_setting = port_of_launcher(*environment.launcher_socket);
      }
      port = parse_int(
          require_setting(port_setting, "MASTER_PORT", environment, self), {1, kMaxPort},
          "Set it to a free port of rank 0's host, the same for all ranks.", to_text(self));
    }
    const StoreAddress address{
        result.host, port, from_environment && environment.agent_store,
        environment.names_come_late};
    result.store = make_tcp_store(address, self, deadline);
    result.store_host =
        ddp::str("which ", address.listener(), " hosts at ", address.host, " port ", port);
    if (!address.agent_listens) result.hosting_rank = 0;
    if (from_environment && environment.attempt) {
      result.store = c10::make_intrusive<c10d::PrefixStore>(
          "attempt_" + environment.attempt->value, result.store);
    }
  }
  return result;
}

}  // namespace ddp
