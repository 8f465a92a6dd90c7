#include "bootstrap.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include <ATen/core/functional.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/Logging.h>
#include <ddp/internal/check.h>
#include <ddp/internal/system/host.h>
#include <ddp/internal/text.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "../memory/gradient_arena.h"
#include "backends/gloo/gloo.h"
#include "backends/local_backend.h"
#include "hierarchical_backend.h"
#include "host_memory.h"
#include "reduce.h"
#include "shm_backend.h"
#include "store/exchange.h"

namespace ddp::backends::shm {
namespace {

struct Round {
  std::string name;
  std::vector<std::string> entries;  // by rank
  std::string problem;               // the first rank's that has one, with its number; else empty
};

// The first character of an entry.
constexpr char kEntry = '=';
constexpr char kProblem = '!';

std::string key_of(const std::string& round, size_t rank) { return ddp::str(round, "/", rank); }

[[noreturn]] void throw_malformed(const Round& round, size_t rank, const char* expected) {
  DDP_CHECK(
      false, "backend shm: expected ", expected, " in the store's entry ", key_of(round.name, rank),
      " of rank ", rank, " of ", round.entries.size(), ", got \"", round.entries[rank],
      "\". Use a store, or a prefix of one, to which nothing else writes.");
}

/// Sends the return value of `make_entry`, or the text of its exception, to all ranks.
///
/// \return  the same on all ranks.
/// \throws c10::Error  if a rank's entry is not there by the deadline, or is malformed.
///
/// Collective: yes. Blocks: host, until the deadline.
/// Cost: exchange()'s.
Round share(
    const Setup& setup, const std::string& name, c10::function_ref<std::string()> make_entry) {
  std::string entry;
  const auto problem = problem_of([&] { entry = make_entry(); });
  std::vector<std::string> keys;
  for (int rank = 0; rank < setup.world_size; ++rank) {
    keys.push_back(key_of(name, static_cast<size_t>(rank)));
  }
  const auto own = problem.empty() ? kEntry + entry : kProblem + problem;
  Round round{name, exchange(*setup.store, keys, setup.rank, own, setup.connect_by.left()), ""};
  for (size_t rank = 0; rank < round.entries.size(); ++rank) {
    auto& text = round.entries[rank];
    const char kind = text.empty() ? '\0' : text[0];
    if (kind != kEntry && kind != kProblem)
      throw_malformed(round, rank, "a text that begins with = or !");
    text.erase(0, 1);
    if (kind == kProblem && round.problem.empty()) {
      round.problem = ddp::str("rank ", rank, ": ", text);
    }
  }
  return round;
}

struct Hosts {
  std::vector<int> locals;   // the ranks of this rank's host; the first one is the leader
  std::vector<int> leaders;  // of all hosts
  int local_rank = 0;

  int local_size() const { return static_cast<int>(locals.size()); }
  bool leads() const { return local_rank == 0; }
  bool are_several() const { return leaders.size() > 1; }
  /// How many control blocks a host needs: one for each engine.
  size_t controls() const { return are_several() ? 2 : 1; }
};

std::string name_of_host() {
  auto name = host_identity();
  DDP_CHECK(!name.empty(), "expected to read /proc/sys/kernel/random/boot_id, but could not");
  return name;
}

std::string to_text(const ArenaLocation& location) {
  return ddp::str(location.pid, ' ', location.fd, ' ', location.bytes, ' ', location.token);
}

bool is_whole(InputText& text) { return text && text.peek() == InputText::traits_type::eof(); }

std::vector<ArenaLocation> parse_locations(const Round& round) {
  std::vector<ArenaLocation> locations(round.entries.size());
  for (size_t rank = 0; rank < locations.size(); ++rank) {
    auto& location = locations[rank];
    InputText text(round.entries[rank]);
    text >> location.pid >> location.fd >> location.bytes >> location.token;
    if (is_whole(text) && location.is_valid()) continue;
    throw_malformed(round, rank, "a process id and where its memory is");
  }
  return locations;
}

std::vector<std::string> hosts_of(const Setup& setup, const HostMemory& memory) {
  return c10::fmap(setup.global_ranks, [&](const auto rank) { return memory.hosts()[rank]; });
}

Hosts find_hosts(const std::vector<std::string>& names, int rank) {
  Hosts hosts;
  for (size_t other = 0; other < names.size(); ++other) {
    const auto first = std::find(names.begin(), names.end(), names[other]) - names.begin();
    if (static_cast<size_t>(first) == other) hosts.leaders.push_back(static_cast<int>(other));
    if (names[other] != names[static_cast<size_t>(rank)]) continue;
    if (static_cast<int>(other) == rank) hosts.local_rank = hosts.local_size();
    hosts.locals.push_back(static_cast<int>(other));
  }
  return hosts;
}

/// Why the hosts' ranks share no memory; empty if those of a host do.
std::string why_no_hosts(const Hosts& hosts, const Setup& setup) {
  const bool apart =
      hosts.are_several() && static_cast<int>(hosts.leaders.size()) == setup.world_size;
  return apart ? "no two ranks are on one host and in one container" : "";
}

/// The memory of the group that this one is made of; null if there is none.
std::shared_ptr<HostMemory> memory_of_parent(const Setup& setup) {
  const auto* parent = dynamic_cast<const FallbackBackend*>(setup.parent.get());
  return parent ? parent->host_memory() : nullptr;
}

/// Values of the group's ranks, by their ranks in the job, which HostMemory counts by.
template <typename T>
std::vector<T> by_rank_of_job(const std::vector<T>& of_group, const Setup& setup) {
  const auto& ranks = setup.global_ranks;
  std::vector<T> all(*std::max_element(ranks.begin(), ranks.end()) + 1);
  for (size_t rank = 0; rank < ranks.size(); ++rank) all[ranks[rank]] = of_group[rank];
  return all;
}

/// Makes this rank's memory, and finds that of the others, which is not mapped yet.
///
/// \return  null with the reason in `why_not`.
std::shared_ptr<HostMemory> make_memory(
    const Setup& setup, const BootstrapOptions& options, std::vector<ArenaLocation>& locations,
    std::string& why_not) {
  const auto named =
      share(setup, "host", [&] { return options.host.empty() ? name_of_host() : options.host; });
  why_not = named.problem;
  if (why_not.empty()) why_not = why_no_hosts(find_hosts(named.entries, setup.rank), setup);
  if (!why_not.empty()) return nullptr;
  std::shared_ptr<HostMemory> memory;
  const auto made = share(setup, "memory", [&] {
    const auto own = static_cast<int>(setup.global_ranks[static_cast<size_t>(setup.rank)]);
    memory = std::make_shared<HostMemory>(
        by_rank_of_job(named.entries, setup), own, options.arena_bytes);
    return to_text(memory->location());
  });
  why_not = made.problem;
  if (!why_not.empty()) return nullptr;
  locations = by_rank_of_job(parse_locations(made), setup);
  return memory;
}

using Controls = std::vector<std::shared_ptr<ControlBlock>>;

/// Opens the blocks that the leader of this host reserved.
Controls open_controls(
    HostMemory& memory, const Setup& setup, const Hosts& hosts, const Round& round) {
  const auto leader = static_cast<size_t>(hosts.locals[0]);
  InputText text(round.entries[leader]);
  Controls controls;
  for (size_t i = 0; i < hosts.controls(); ++i) {
    size_t offset = 0;
    text >> offset;
    if (!text) break;
    controls.push_back(memory.open_control(
        static_cast<int>(setup.global_ranks[leader]), offset, hosts.local_size()));
  }
  const bool all = controls.size() == hosts.controls() &&
                   std::count(controls.begin(), controls.end(), nullptr) == 0;
  if (!all || !is_whole(text)) throw_malformed(round, leader, "where its host's state is");
  return controls;
}

std::string reserve_controls(HostMemory& memory, const Hosts& hosts) {
  std::vector<size_t> offsets;
  while (offsets.size() < hosts.controls()) {
    offsets.push_back(memory.reserve_control(hosts.local_size()));
  }
  return joined_by(" ", offsets);
}

Setup setup_of_leaders(const Setup& setup, const Hosts& hosts) {
  auto leaders = setup;
  leaders.store = c10::make_intrusive<c10d::PrefixStore>("leaders", setup.store);
  leaders.rank = static_cast<int>(
      std::find(hosts.leaders.begin(), hosts.leaders.end(), setup.rank) - hosts.leaders.begin());
  leaders.world_size = static_cast<int>(hosts.leaders.size());
  leaders.group_name += ", leaders of hosts";
  leaders.global_ranks.clear();
  for (const int rank : hosts.leaders) {
    leaders.global_ranks.push_back(setup.global_ranks[static_cast<size_t>(rank)]);
  }
  return leaders;
}

Setup setup_of_gloo(const Setup& setup) {
  auto gloo = setup;
  gloo.store = c10::make_intrusive<c10d::PrefixStore>("gloo", setup.store);
  return gloo;
}

// Logged because the choice of `backend("")` decides how fast the job is.
void log_choice(const Setup& setup, const BootstrapResult& shared) {
  if (setup.global_ranks[static_cast<size_t>(setup.rank)] != 0) return;
  LOG(INFO) << setup.group_name << ": backend(\"\") chose \"" << (shared.backend ? "shm" : "gloo")
            << "\" for CPU tensors" << (shared.backend ? "." : ", for " + shared.why_not + ".");
}

BackendPtr make_backend(
    const Setup& setup, const Hosts& hosts, const std::shared_ptr<HostMemory>& memory,
    const Controls& controls, const BackendPtr& leaders) {
  std::vector<Peer> peers;
  for (const int rank : hosts.locals) {
    peers.push_back(memory->peer(static_cast<int>(setup.global_ranks[static_cast<size_t>(rank)])));
    peers.back().rank = rank;
  }
  const auto engine_on = [&](size_t control) {
    return ProgressEngine::make(
        hosts.local_rank, controls[control], peers, memory->arena(), setup.timeout);
  };
  if (!hosts.are_several()) {
    const auto engine = engine_on(0);
    const auto fail = [weak = std::weak_ptr<ProgressEngine>(engine),
                       rank = setup.rank](const std::string& why) {
      if (const auto alive = weak.lock()) {
        alive->fail(ddp::str("shm: Gloo could not connect on rank ", rank, ": ", why));
      }
    };
    return c10::make_intrusive<ShmBackend>(
        setup.rank, setup.world_size, memory, engine,
        std::make_shared<GlooCarrier>(setup_of_gloo(setup), fail));
  }
  return c10::make_intrusive<HierarchicalBackend>(
      setup.rank, setup.world_size, memory,
      Host{
          memory->arena(), engine_on(0), engine_on(1), hosts.local_rank, hosts.local_size(),
          hosts.leaders},
      leaders, make_gloo(setup_of_gloo(setup)), setup.timeout);
}

}  // namespace

BootstrapResult bootstrap(const Setup& setup, const BootstrapOptions& options) {
  auto memory = memory_of_parent(setup);
  const bool is_mapped = memory != nullptr;
  std::vector<ArenaLocation> locations;
  std::string why_not;
  if (!is_mapped) memory = make_memory(setup, options, locations, why_not);
  if (!memory) return {nullptr, why_not};
  const auto hosts = find_hosts(hosts_of(setup, *memory), setup.rank);
  why_not = why_no_hosts(hosts, setup);
  if (!why_not.empty()) return {nullptr, why_not};

  const auto reserved = share(setup, "state", [&] {
    if (!is_mapped) memory->map(locations);
    return hosts.leads() ? reserve_controls(*memory, hosts) : "";
  });
  if (!reserved.problem.empty()) return {nullptr, reserved.problem};
  const auto controls = open_controls(*memory, setup, hosts, reserved);
  BackendPtr leaders;
  if (hosts.are_several()) {
    const auto led = share(setup, "led", [&] {
      if (hosts.leads()) leaders = make_gloo(setup_of_leaders(setup, hosts));
      return "";
    });
    if (!led.problem.empty()) return {nullptr, led.problem};
  }
  return {make_backend(setup, hosts, memory, controls, leaders), ""};
}

namespace {

BackendPtr make_shm_or_gloo(const Setup& setup) {
  if (setup.world_size == 1 && !setup.required) {
    return make_single_rank_backend("gloo", setup.timeout);
  }
  const auto shared = bootstrap(setup, {});
  DDP_CHECK(
      shared.backend || !setup.required,
      "backend shm: expected ranks of a host to map each other's memory, but ", shared.why_not,
      ". Start at least two of them on one host and in one container as one user, or use "
      "backend(\"gloo\").");
  if (!setup.required) log_choice(setup, shared);
  return shared.backend ? shared.backend : make_gloo(setup_of_gloo(setup));
}

}  // namespace

}  // namespace ddp::backends::shm

namespace ddp::backends {

RegisteredBackend describe_shm() {
  RegisteredBackend shm;
  shm.name = "shm";
  shm.devices = {"cpu"};
  shm.is_default = true;
  shm.capabilities = [] {
    BackendCapabilities capabilities;
    capabilities.averages = true;
    capabilities.falls_back_to_gloo = true;
    capabilities.reductions = &shm::reductions();
    return capabilities;
  };
  shm.gradient_memory = [](c10d::Backend& backend) -> std::shared_ptr<GradientMemory> {
    const auto* own = dynamic_cast<shm::FallbackBackend*>(&backend);
    if (!own) return nullptr;
    // A dtype that it averages can also be summed.
    return std::make_shared<shm::GradientArena>(
        own->arena(), own->least_in_place(),
        [](at::ScalarType type) { return shm::can_reduce(type, c10d::ReduceOp::AVG); });
  };
  shm.make = shm::make_shm_or_gloo;
  return shm;
}

}  // namespace ddp::backends
