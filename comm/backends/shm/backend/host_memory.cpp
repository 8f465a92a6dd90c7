#include "host_memory.h"

#include <sys/auxv.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>

#include <ddp/internal/check.h>
#include <ddp/internal/owner_process.h>

namespace ddp::backends::shm {
namespace {

// Each rank maps the arenas of all ranks of its host.
size_t bytes_of_all_ranks() {
  // AT_RANDOM lies on the stack of the process, the same for all threads.
  return mappable_bytes(static_cast<uintptr_t>(::getauxval(AT_RANDOM)));
}

// As much as the host's memory: untouched pages take none.
size_t default_arena_bytes(int64_t ranks) {
  const auto page = page_bytes();
  const size_t host = static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * page;
  return std::min(host, bytes_of_all_ranks() / static_cast<size_t>(ranks)) / page * page;
}

uint64_t random_token() {
  std::random_device random;
  return static_cast<uint64_t>(random()) << 32 | random();
}

}  // namespace

size_t mappable_bytes(uintptr_t stack_address) {
  int bits = 0;
  for (auto left = stack_address; left > 0; left >>= 1) ++bits;
  constexpr int kBitsOfJobs = 5;  // of the addresses: many jobs of one process must have room
  return size_t{1} << std::max(bits - kBitsOfJobs, 0);
}

bool ArenaLocation::is_valid() const {
  return pid > 0 && fd >= 0 && bytes > 0 && bytes <= bytes_of_all_ranks() &&
         bytes % page_bytes() == 0;
}

HostMemory::HostMemory(std::vector<std::string> hosts, int rank, size_t arena_bytes)
    : hosts_(std::move(hosts)), rank_(rank) {
  const auto& host = hosts_[static_cast<size_t>(rank)];
  location_.pid = ::getpid();
  location_.bytes = arena_bytes > 0
                        ? arena_bytes
                        : default_arena_bytes(std::count(hosts_.begin(), hosts_.end(), host));
  location_.token = random_token();
  own_ = Segment::make(location_.bytes + page_bytes());  // the token has a page of its own
  std::memcpy(own_->data() + location_.bytes, &location_.token, sizeof(location_.token));
  location_.fd = own_->fd();
  arena_ = std::make_shared<Arena>(own_, location_.bytes);
}

HostMemory::~HostMemory() { arena_->freeze(); }

void HostMemory::map(const std::vector<ArenaLocation>& locations) {
  peers_.resize(hosts_.size());
  for (size_t rank = 0; rank < hosts_.size(); ++rank) {
    if (hosts_[rank] != hosts_[static_cast<size_t>(rank_)]) continue;
    const auto& location = locations[rank];
    auto& peer = peers_[rank];
    const bool own = static_cast<int>(rank) == rank_;
    peer.rank = static_cast<int>(rank);
    peer.process = std::make_shared<ProcessWatch>(location.pid);
    peer.memory =
        own ? own_ : Segment::open(location.pid, location.fd, location.bytes + page_bytes());
    uint64_t token = 0;
    std::memcpy(&token, peer.memory->data() + location.bytes, sizeof(token));
    DDP_CHECK(
        token == location.token, "expected the memory of rank ", rank, " in process ", location.pid,
        ", but found another's: it is on another host, or has ended");
  }
}

size_t HostMemory::reserve_control(int ranks) {
  {
    const std::lock_guard lock(mutex_);
    release_unused_locked();
  }
  const size_t bytes = ControlBlock::bytes_for(ranks);
  auto* block = arena_->try_reserve(bytes);
  DDP_CHECK_WITH(
      OutOfMemoryError, block != nullptr, "shared memory: expected ", bytes,
      " bytes for the state of a group, but the ", location_.bytes, " of rank ", rank_,
      " are in use.");
  ControlBlock::make(block, ranks);
  return arena_->offset_at(block);
}

std::shared_ptr<ControlBlock> HostMemory::open_control(int leader, size_t offset, int ranks) {
  const auto& memory = peer(leader).memory;
  const size_t bytes = ControlBlock::bytes_for(ranks);
  if (bytes > memory->bytes() || offset > memory->bytes() - bytes || offset % page_bytes() != 0) {
    return nullptr;
  }
  const auto close = [self = shared_from_this(), owner = OwnerProcess(), bytes,
                      leads = leader == rank_](ControlBlock* control) {
    if (!owner.is_this_one()) return;
    --control->users;
    if (leads) self->retire(control, bytes);
  };
  return {reinterpret_cast<ControlBlock*>(memory->data() + offset), close};
}

void HostMemory::retire(ControlBlock* control, size_t bytes) {
  const std::lock_guard lock(mutex_);
  retired_.emplace_back(control, bytes);
  release_unused_locked();
}

void HostMemory::release_unused_locked() {
  const auto is_used = [](const auto& retired) { return retired.first->users > 0; };
  const auto unused = std::partition(retired_.begin(), retired_.end(), is_used);
  for (auto it = unused; it != retired_.end(); ++it) {
    arena_->release(reinterpret_cast<std::byte*>(it->first), it->second, Arena::OnRelease::kKeep);
  }
  retired_.erase(unused, retired_.end());
}

}  // namespace ddp::backends::shm
