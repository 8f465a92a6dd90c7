#include "bootstrap.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <ddp/error_text.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "../../gloo.h"
#include "../../registry.h"
#include "hierarchical_backend.h"
#include "shm_backend.h"

namespace ddp::backends::shm {
namespace {

/// What a rank tells the others of itself.
struct Place {
  pid_t pid = 0;
  int arena_fd = -1;
  int control_fds[2] = {-1, -1};  // of the host's leader
  size_t bytes = 0;               // of the arena
  uint64_t token = 0;             // behind the arena, to know it by
};

/// Who is where.
struct Hosts {
  std::vector<int> locals;   // the ranks of this rank's host; the first one leads
  std::vector<int> leaders;  // of all hosts
  int local_rank = 0;

  int local_size() const { return static_cast<int>(locals.size()); }
  bool leads() const { return local_rank == 0; }
};

// The page behind the arena, for the token.
constexpr size_t kTokenPage = 4096;

std::string namespace_of(const char* kind) {
  struct stat info {};
  const auto path = c10::str("/proc/self/ns/", kind);
  return ::stat(path.c_str(), &info) == 0 ? std::to_string(info.st_ino) : "?";
}

// Processes with the same name are on one kernel, know each other's process ids, and are no
// stand-ins for hosts of their own, as containers and network namespaces are.
std::string name_of_host() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  TORCH_CHECK(!boot.empty(), "expected to read /proc/sys/kernel/random/boot_id, but could not");
  return c10::str(boot, "/", namespace_of("pid"), "/", namespace_of("net"));
}

// As much as the host has, for untouched pages take no memory; but each rank maps all the others',
// and the 47 bits of an address have to do for many groups.
size_t arena_bytes(int ranks) {
  constexpr size_t kOfAllRanks = size_t{1} << 42;
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t host = static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * page;
  return std::min(host, kOfAllRanks / static_cast<size_t>(ranks)) / kTokenPage * kTokenPage;
}

uint64_t random_token() {
  std::random_device random;
  return static_cast<uint64_t>(random()) << 32 | random();
}

std::string to_text(const Place& place) {
  return c10::str(
      place.pid, ' ', place.arena_fd, ' ', place.control_fds[0], ' ', place.control_fds[1], ' ',
      place.bytes, ' ', place.token);
}

Place parse_place(const std::string& text) {
  Place place;
  std::istringstream(text) >> place.pid >> place.arena_fd >> place.control_fds[0] >>
      place.control_fds[1] >> place.bytes >> place.token;
  return place;
}

/// The ranks' answers to one question, by rank.
std::vector<std::string> ask_all(
    const Setup& setup, const std::string& question, const std::string& answer) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < setup.world_size; ++rank) {
    keys.push_back(c10::str(question, "/", rank));
  }
  setup.store->set(keys[static_cast<size_t>(setup.rank)], answer);
  setup.store->wait(keys, setup.connect_by.left());
  std::vector<std::string> answers;
  for (const auto& key : keys) answers.push_back(setup.store->get_to_str(key));
  return answers;
}

/// The first answer that is not empty, with its rank: the same on all ranks.
std::string first_problem(const std::vector<std::string>& problems) {
  for (size_t rank = 0; rank < problems.size(); ++rank) {
    if (!problems[rank].empty()) return c10::str("rank ", rank, ": ", problems[rank]);
  }
  return "";
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

void make_memory(const Hosts& hosts, size_t controls, Memory& memory, Place& place) {
  place.pid = ::getpid();
  place.bytes = arena_bytes(hosts.local_size());
  place.token = random_token();
  memory.own = Segment::make(place.bytes + kTokenPage);
  std::memcpy(memory.own->data() + place.bytes, &place.token, sizeof(place.token));
  place.arena_fd = memory.own->fd();
  for (size_t i = 0; hosts.leads() && i < controls; ++i) {
    memory.controls.push_back(make_control(hosts.local_size()));
    place.control_fds[i] = memory.controls.back()->fd();
  }
}

std::vector<Peer> map_memory(
    const Hosts& hosts, size_t controls, Memory& memory, const std::vector<Place>& places) {
  const auto& leader = places[static_cast<size_t>(hosts.locals[0])];
  for (size_t i = memory.controls.size(); i < controls; ++i) {
    memory.controls.push_back(Segment::open(
        leader.pid, leader.control_fds[i], ControlBlock::bytes_for(hosts.local_size())));
  }
  std::vector<Peer> peers;
  for (const int rank : hosts.locals) {
    const auto& place = places[static_cast<size_t>(rank)];
    const bool own = rank == hosts.locals[static_cast<size_t>(hosts.local_rank)];
    peers.push_back(
        {rank, std::make_shared<ProcessWatch>(place.pid),
         own ? memory.own : Segment::open(place.pid, place.arena_fd, place.bytes + kTokenPage)});
    uint64_t token = 0;
    std::memcpy(&token, peers.back().memory->data() + place.bytes, sizeof(token));
    TORCH_CHECK(
        token == place.token, "expected the memory of rank ", rank, " in process ", place.pid,
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

// What `backend("")` came to is told once a job, as it decides how fast the job is.
void tell_choice(const Setup& setup, const BootstrapResult& shared) {
  if (setup.global_ranks[static_cast<size_t>(setup.rank)] != 0) return;
  if (shared.backend) {
    TORCH_WARN_ONCE(
        "CPU tensors go through memory that the ranks of a host share: backend(\"\") chose "
        "\"shm\".");
  } else {
    TORCH_WARN_ONCE(
        "CPU tensors go over sockets: backend(\"\") chose \"gloo\", for ", shared.why_not, ".");
  }
}

}  // namespace

BootstrapResult bootstrap(const Setup& setup, const BackendPtr& gloo, const std::string& host) {
  std::string name = host;
  auto why_not = first_problem(ask_all(setup, "named", problem_of([&] {
                                         if (name.empty()) name = name_of_host();
                                       })));
  if (!why_not.empty()) return {nullptr, why_not};
  const auto hosts = find_hosts(ask_all(setup, "host", name), setup.rank);
  const bool several = hosts.leaders.size() > 1;
  if (several && static_cast<int>(hosts.leaders.size()) == setup.world_size) {
    return {nullptr, "no two ranks are on one host and in one container"};
  }

  const size_t controls = several ? 2 : 1;
  Memory memory;
  Place own;
  why_not = first_problem(
      ask_all(setup, "made", problem_of([&] { make_memory(hosts, controls, memory, own); })));
  if (!why_not.empty()) return {nullptr, why_not};
  std::vector<Place> places;
  for (const auto& text : ask_all(setup, "place", to_text(own)))
    places.push_back(parse_place(text));

  std::vector<Peer> peers;
  why_not = first_problem(ask_all(
      setup, "mapped", problem_of([&] { peers = map_memory(hosts, controls, memory, places); })));
  if (!why_not.empty()) return {nullptr, why_not};
  BackendPtr leaders;
  const auto lead = [&] {
    if (!several || !hosts.leads()) return;
    leaders = make_gloo(setup_of_leaders(setup, hosts));
  };
  if (several) why_not = first_problem(ask_all(setup, "led", problem_of(lead)));
  if (!why_not.empty()) return {nullptr, why_not};

  auto arena = std::make_shared<Arena>(memory.own, own.bytes);
  const auto engine_on = [&](size_t control) {
    return ProgressEngine::make(
        hosts.local_rank, memory.controls[control], peers, arena, setup.timeout);
  };
  if (!several) {
    return {
        c10::make_intrusive<ShmBackend>(setup.rank, setup.world_size, arena, engine_on(0), gloo),
        ""};
  }
  return {
      c10::make_intrusive<HierarchicalBackend>(
          setup.rank, setup.world_size,
          Host{
              arena, engine_on(0), engine_on(1), hosts.local_rank, hosts.local_size(),
              hosts.leaders},
          leaders, gloo, setup.timeout),
      ""};
}

namespace {

BackendPtr make_shm_or_gloo(const Setup& setup) {
  const auto gloo = make_gloo(setup);
  if (setup.world_size == 1 && !setup.required) return gloo;
  const auto shared = bootstrap(setup, gloo);
  TORCH_CHECK(
      shared.backend || !setup.required,
      "backend shm: expected ranks of a host to map each other's memory, but ", shared.why_not,
      ". Start at least two of them on one host and in one container as one user, or use "
      "backend(\"gloo\").");
  if (!setup.required) tell_choice(setup, shared);
  return shared.backend ? shared.backend : gloo;
}

}  // namespace

}  // namespace ddp::backends::shm

namespace ddp::backends {

Description describe_shm() {
  Description shm;
  shm.name = "shm";
  shm.devices = {"cpu"};
  shm.is_default = true;
  shm.capabilities = [] {
    BackendCapabilities capabilities;
    capabilities.averages = true;
    capabilities.falls_back_to_gloo = true;
    return capabilities;
  };
  shm.make = shm::make_shm_or_gloo;
  return shm;
}

}  // namespace ddp::backends
