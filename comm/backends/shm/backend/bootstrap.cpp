#include "bootstrap.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <random>
#include <utility>

#include <c10/util/Logging.h>
#include <ddp/internal/check.h>
#include <ddp/internal/error_text.h>
#include <ddp/internal/text.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "../../registry.h"
#include "../memory/gradient_arena.h"
#include "backends/gloo/gloo.h"
#include "bootstrap_round.h"
#include "hierarchical_backend.h"
#include "reduce.h"
#include "shm_backend.h"

namespace ddp::backends::shm {
namespace {

/// Where the other ranks of a host find a rank's memory.
struct MemoryLocation {
  pid_t pid = 0;
  int arena_fd = -1;
  int control_fds[2] = {-1, -1};  // set by the host's leader only
  size_t bytes = 0;               // of the arena
  uint64_t token = 0;             // random; stored after the arena, to tell it from another job's
};

/// The assignment of ranks to hosts.
struct Hosts {
  std::vector<int> locals;   // the ranks of this rank's host; the first one is the leader
  std::vector<int> leaders;  // of all hosts
  int local_rank = 0;

  int local_size() const { return static_cast<int>(locals.size()); }
  bool leads() const { return local_rank == 0; }
};

constexpr size_t kPage = 4096;
// The token's page, after the arena.
constexpr size_t kTokenPage = kPage;
// Each rank maps the arenas of all ranks of its host. An address has 47 bits, which must suffice
// for many groups.
constexpr size_t kBytesOfAllRanks = size_t{1} << 42;

std::string namespace_of(const char* kind) {
  struct stat info {};
  const auto path = ddp::str("/proc/self/ns/", kind);
  return ::stat(path.c_str(), &info) == 0 ? std::to_string(info.st_ino) : "?";
}

// Processes with the same name run on one kernel and see each other's process ids. The names of
// containers and network namespaces differ, so these can represent hosts.
std::string name_of_host() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  DDP_CHECK(!boot.empty(), "expected to read /proc/sys/kernel/random/boot_id, but could not");
  return ddp::str(boot, "/", namespace_of("pid"), "/", namespace_of("net"));
}

// As much as the host's memory: untouched pages take none.
size_t arena_bytes(int ranks) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t host = static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * page;
  return std::min(host, kBytesOfAllRanks / static_cast<size_t>(ranks)) / kPage * kPage;
}

uint64_t random_token() {
  std::random_device random;
  return static_cast<uint64_t>(random()) << 32 | random();
}

std::string to_text(const MemoryLocation& location) {
  return ddp::str(
      location.pid, ' ', location.arena_fd, ' ', location.control_fds[0], ' ',
      location.control_fds[1], ' ', location.bytes, ' ', location.token);
}

std::vector<MemoryLocation> parse_locations(const Round& round) {
  std::vector<MemoryLocation> locations(round.entries.size());
  for (size_t rank = 0; rank < locations.size(); ++rank) {
    auto& location = locations[rank];
    InputText text(round.entries[rank]);
    text >> location.pid >> location.arena_fd >> location.control_fds[0] >>
        location.control_fds[1] >> location.bytes >> location.token;
    const bool is_whole = text && text.peek() == InputText::traits_type::eof();
    const bool is_valid = location.pid > 0 && location.arena_fd >= 0 && location.bytes > 0 &&
                          location.bytes <= kBytesOfAllRanks && location.bytes % kPage == 0;
    if (is_whole && is_valid) continue;
    throw_malformed(round, rank, "a process id and where its memory is");
  }
  return locations;
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

struct Memory {
  std::shared_ptr<Segment> own;
  std::vector<std::shared_ptr<Segment>> controls;  // one, or over several hosts two
};

std::shared_ptr<Segment> make_control(int ranks) {
  auto segment = Segment::make(ControlBlock::bytes_for(ranks));
  auto* control = new (segment->data()) ControlBlock;
  for (int rank = 0; rank < ranks; ++rank) new (&control->of(rank)) RankState;
  return segment;
}

MemoryLocation make_memory(const Hosts& hosts, size_t controls, size_t bytes, Memory& memory) {
  MemoryLocation location;
  location.pid = ::getpid();
  location.bytes = bytes > 0 ? bytes : arena_bytes(hosts.local_size());
  location.token = random_token();
  memory.own = Segment::make(location.bytes + kTokenPage);
  std::memcpy(memory.own->data() + location.bytes, &location.token, sizeof(location.token));
  location.arena_fd = memory.own->fd();
  for (size_t i = 0; hosts.leads() && i < controls; ++i) {
    memory.controls.push_back(make_control(hosts.local_size()));
    location.control_fds[i] = memory.controls.back()->fd();
  }
  return location;
}

std::vector<Peer> map_memory(
    const Hosts& hosts, size_t controls, Memory& memory,
    const std::vector<MemoryLocation>& locations) {
  const auto& leader = locations[static_cast<size_t>(hosts.locals[0])];
  for (size_t i = memory.controls.size(); i < controls; ++i) {
    memory.controls.push_back(Segment::open(
        leader.pid, leader.control_fds[i], ControlBlock::bytes_for(hosts.local_size())));
  }
  std::vector<Peer> peers;
  for (const int rank : hosts.locals) {
    const auto& location = locations[static_cast<size_t>(rank)];
    const bool own = rank == hosts.locals[static_cast<size_t>(hosts.local_rank)];
    peers.push_back(
        {rank, std::make_shared<ProcessWatch>(location.pid),
         own ? memory.own
             : Segment::open(location.pid, location.arena_fd, location.bytes + kTokenPage)});
    uint64_t token = 0;
    std::memcpy(&token, peers.back().memory->data() + location.bytes, sizeof(token));
    DDP_CHECK(
        token == location.token, "expected the memory of rank ", rank, " in process ", location.pid,
        ", but found another's: it is on another host, or has ended");
  }
  return peers;
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

// Logged because the choice of `backend("")` decides how fast the job is.
void log_choice(const Setup& setup, const BootstrapResult& shared) {
  if (setup.global_ranks[static_cast<size_t>(setup.rank)] != 0) return;
  LOG(INFO) << setup.group_name << ": backend(\"\") chose \"" << (shared.backend ? "shm" : "gloo")
            << "\" for CPU tensors" << (shared.backend ? "." : ", for " + shared.why_not + ".");
}

BackendPtr make_backend(
    const Setup& setup, const Hosts& hosts, const Memory& memory, const std::vector<Peer>& peers,
    size_t arena_bytes, const BackendPtr& gloo, const BackendPtr& leaders) {
  const auto arena = std::make_shared<Arena>(memory.own, arena_bytes);
  const auto engine_on = [&](size_t control) {
    return ProgressEngine::make(
        hosts.local_rank, memory.controls[control], peers, arena, setup.timeout);
  };
  if (memory.controls.size() == 1) {
    return c10::make_intrusive<ShmBackend>(setup.rank, setup.world_size, arena, engine_on(0), gloo);
  }
  return c10::make_intrusive<HierarchicalBackend>(
      setup.rank, setup.world_size,
      Host{arena, engine_on(0), engine_on(1), hosts.local_rank, hosts.local_size(), hosts.leaders},
      leaders, gloo, setup.timeout);
}

}  // namespace

BootstrapResult bootstrap(
    const Setup& setup, const BackendPtr& gloo, const BootstrapOptions& options) {
  const auto named =
      share(setup, "host", [&] { return options.host.empty() ? name_of_host() : options.host; });
  if (!named.problem.empty()) return {nullptr, named.problem};
  const auto hosts = find_hosts(named.entries, setup.rank);
  const bool several = hosts.leaders.size() > 1;
  if (several && static_cast<int>(hosts.leaders.size()) == setup.world_size) {
    return {nullptr, "no two ranks are on one host and in one container"};
  }

  const size_t controls = several ? 2 : 1;
  Memory memory;
  const auto made = share(setup, "memory", [&] {
    return to_text(make_memory(hosts, controls, options.arena_bytes, memory));
  });
  if (!made.problem.empty()) return {nullptr, made.problem};
  const auto locations = parse_locations(made);

  std::vector<Peer> peers;
  const auto mapped = share(setup, "mapped", [&] {
    peers = map_memory(hosts, controls, memory, locations);
    return "";
  });
  if (!mapped.problem.empty()) return {nullptr, mapped.problem};
  BackendPtr leaders;
  if (several) {
    const auto led = share(setup, "led", [&] {
      if (hosts.leads()) leaders = make_gloo(setup_of_leaders(setup, hosts));
      return "";
    });
    if (!led.problem.empty()) return {nullptr, led.problem};
  }

  const auto bytes = locations[static_cast<size_t>(setup.rank)].bytes;
  return {make_backend(setup, hosts, memory, peers, bytes, gloo, leaders), ""};
}

namespace {

BackendPtr make_shm_or_gloo(const Setup& setup) {
  auto gloo = make_gloo(setup);
  if (setup.world_size == 1 && !setup.required) return gloo;
  const auto shared = bootstrap(setup, gloo, {});
  DDP_CHECK(
      shared.backend || !setup.required,
      "backend shm: expected ranks of a host to map each other's memory, but ", shared.why_not,
      ". Start at least two of them on one host and in one container as one user, or use "
      "backend(\"gloo\").");
  if (!setup.required) log_choice(setup, shared);
  return shared.backend ? shared.backend : gloo;
}

}  // namespace

}  // namespace ddp::backends::shm

namespace ddp::backends {

BackendDescription describe_shm() {
  BackendDescription shm;
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
    if (!own || !own->arena()) return nullptr;
    // A dtype that it averages can also be summed.
    return std::make_shared<shm::GradientArena>(
        own->arena(), own->least_in_place(),
        [](at::ScalarType type) { return shm::can_reduce(type, c10d::ReduceOp::AVG); });
  };
  shm.make = shm::make_shm_or_gloo;
  return shm;
}

}  // namespace ddp::backends
