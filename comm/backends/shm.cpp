// How the ranks of a host come to share memory.
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
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
  int board_fd = -1;  // of rank 0's alone
  size_t bytes = 0;   // of the arena
};

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
  return c10::str(boot, "/", namespace_of("pid"), "/", namespace_of("net"));
}

// As much as the host has: untouched pages cost nothing.
size_t arena_bytes() {
  return static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) *
         static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

std::string to_text(const Place& place) {
  return c10::str(
      place.host, ' ', place.pid, ' ', place.arena_fd, ' ', place.board_fd, ' ', place.bytes);
}

Place parse_place(const std::string& text) {
  Place place;
  std::istringstream(text) >> place.host >> place.pid >> place.arena_fd >> place.board_fd >>
      place.bytes;
  return place;
}

int watch(pid_t pid) {
  if (pid == ::getpid()) return -1;
#ifdef SYS_pidfd_open
  return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
#else
  return -1;
#endif
}

/// The ranks' answers to one question, by rank.
std::vector<std::string> exchange(
    const Setup& setup, const std::string& question, const std::string& answer) {
  const auto key = [&](int rank) { return c10::str(question, "/", rank); };
  setup.store->set(key(setup.rank), answer);
  std::vector<std::string> answers;
  for (int rank = 0; rank < setup.world_size; ++rank) {
    setup.store->wait({key(rank)}, setup.connect_by.left());
    answers.push_back(setup.store->get_to_str(key(rank)));
  }
  return answers;
}

/// The first answer that is not empty, with its rank: the same on all ranks.
std::string first_problem(const std::vector<std::string>& problems) {
  for (size_t rank = 0; rank < problems.size(); ++rank) {
    if (!problems[rank].empty()) return c10::str("rank ", rank, ": ", problems[rank]);
  }
  return "";
}

template <typename Body>
std::string problem_of(Body&& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return text_of(error);
  }
  return "";
}

struct Memory {
  std::shared_ptr<Segment> own;
  std::shared_ptr<Segment> board;
};

void make_memory(const Setup& setup, Memory& memory, Place& place) {
  place.bytes = arena_bytes();
  memory.own = Segment::make(place.bytes);
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
    const bool own = rank == setup.rank;
    peers.push_back(
        {place.pid, -1, own ? memory.own : Segment::open(place.pid, place.arena_fd, place.bytes)});
    peers.back().pidfd = watch(place.pid);
  }
  return peers;
}

}  // namespace

Shared make_shm(const Setup& setup, const c10::intrusive_ptr<c10d::Backend>& gloo) {
  Memory memory;
  Place own{name_of_host(), ::getpid()};
  auto why_not =
      first_problem(exchange(setup, "made", problem_of([&] { make_memory(setup, memory, own); })));
  if (!why_not.empty()) return {nullptr, why_not};

  std::vector<Place> places;
  for (const auto& text : exchange(setup, "place", to_text(own))) {
    places.push_back(parse_place(text));
    const int rank = static_cast<int>(places.size()) - 1;
    if (why_not.empty() && places.back().host != places.front().host) {
      why_not = c10::str("rank ", rank, " is on another host than rank 0, or in another container");
    }
  }
  if (!why_not.empty()) return {nullptr, why_not};

  std::vector<shm::Peer> peers;
  why_not = first_problem(
      exchange(setup, "mapped", problem_of([&] { peers = map_memory(setup, memory, places); })));
  if (!why_not.empty()) return {nullptr, why_not};

  return {
      c10::make_intrusive<shm::ShmBackend>(
          setup.rank, setup.world_size, std::make_shared<shm::Arena>(memory.own),
          std::make_shared<shm::Exchange>(
              setup.rank, memory.board, std::move(peers), setup.timeout),
          gloo),
      ""};
}

}  // namespace ddp::backends
