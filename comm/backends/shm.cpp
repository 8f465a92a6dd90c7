// How the ranks of a host come to share memory.
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

#include "../error_text.h"
#include "backends/backends.h"
#include "backends/shm/shm_backend.h"

namespace ddp::backends {
namespace {

using shm::Segment;

/// What a rank tells the others of itself.
struct Place {
  std::string host;
  pid_t pid = 0;
  int arena_fd = -1;
  int board_fd = -1;   // of rank 0's alone
  size_t bytes = 0;    // of the arena
  uint64_t token = 0;  // behind the arena, to know it by
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
// and addresses have 47 bits.
size_t arena_bytes(int ranks) {
  constexpr size_t kOfAllRanks = size_t{1} << 44;
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
      place.host, ' ', place.pid, ' ', place.arena_fd, ' ', place.board_fd, ' ', place.bytes, ' ',
      place.token);
}

Place parse_place(const std::string& text) {
  Place place;
  std::istringstream(text) >> place.host >> place.pid >> place.arena_fd >> place.board_fd >>
      place.bytes >> place.token;
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

struct Memory {
  std::shared_ptr<Segment> own;
  std::shared_ptr<Segment> board;
};

void make_memory(const Setup& setup, Memory& memory, Place& place) {
  place.host = name_of_host();
  place.pid = ::getpid();
  place.bytes = arena_bytes(setup.world_size);
  place.token = random_token();
  memory.own = Segment::make(place.bytes + kTokenPage);
  std::memcpy(memory.own->data() + place.bytes, &place.token, sizeof(place.token));
  place.arena_fd = memory.own->fd();
  if (setup.rank == 0) {
    memory.board = Segment::make(shm::Board::bytes_for(setup.world_size));
    new (memory.board->data()) shm::Board;
    for (int rank = 0; rank < setup.world_size; ++rank) {
      new (&reinterpret_cast<shm::Board*>(memory.board->data())->of(rank)) shm::RankBoard;
    }
    place.board_fd = memory.board->fd();
  }
}

std::vector<shm::Peer> map_memory(
    const Setup& setup, Memory& memory, const std::vector<Place>& places) {
  if (!memory.board) {
    memory.board =
        Segment::open(places[0].pid, places[0].board_fd, shm::Board::bytes_for(setup.world_size));
  }
  std::vector<shm::Peer> peers;
  for (int rank = 0; rank < setup.world_size; ++rank) {
    const auto& place = places[rank];
    peers.push_back(
        {std::make_shared<shm::ProcessWatch>(place.pid),
         rank == setup.rank ? memory.own
                            : Segment::open(place.pid, place.arena_fd, place.bytes + kTokenPage)});
    uint64_t token = 0;
    std::memcpy(&token, peers.back().memory->data() + place.bytes, sizeof(token));
    TORCH_CHECK(
        token == place.token, "expected the memory of rank ", rank, " in process ", place.pid,
        ", but found another's: it is on another host, or has ended");
  }
  return peers;
}

}  // namespace

Shared make_shm(const Setup& setup, const c10::intrusive_ptr<c10d::Backend>& gloo) {
  Memory memory;
  Place own;
  auto why_not =
      first_problem(ask_all(setup, "made", problem_of([&] { make_memory(setup, memory, own); })));
  if (!why_not.empty()) return {nullptr, why_not};

  std::vector<Place> places;
  for (const auto& text : ask_all(setup, "place", to_text(own))) {
    places.push_back(parse_place(text));
    const int rank = static_cast<int>(places.size()) - 1;
    if (why_not.empty() && places.back().host != places.front().host) {
      why_not = c10::str("rank ", rank, " is on another host than rank 0, or in another container");
    }
  }
  if (!why_not.empty()) return {nullptr, why_not};

  std::vector<shm::Peer> peers;
  why_not = first_problem(
      ask_all(setup, "mapped", problem_of([&] { peers = map_memory(setup, memory, places); })));
  if (!why_not.empty()) return {nullptr, why_not};

  auto arena = std::make_shared<shm::Arena>(memory.own, own.bytes);
  auto collectives =
      shm::Exchange::make(setup.rank, memory.board, std::move(peers), arena, setup.timeout);
  return {
      c10::make_intrusive<shm::ShmBackend>(
          setup.rank, setup.world_size, std::move(arena), std::move(collectives), gloo),
      ""};
}

}  // namespace ddp::backends
