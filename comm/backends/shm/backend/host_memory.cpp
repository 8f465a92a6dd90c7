#include "host_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>

#include <ddp/internal/check.h>
#include <ddp/internal/owner_process.h>

namespace ddp::backends::shm {
namespace {

// The token's page, after the arena, which has whole pages too.
constexpr size_t kTokenPage = 4096;
// Each rank maps the arenas of all ranks of its host. An address has 47 bits, which must suffice
// for many jobs of one process.
constexpr size_t kBytesOfAllRanks = size_t{1} << 42;

// As much as the host's memory: untouched pages take none.
size_t default_arena_bytes(int64_t ranks) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t host = static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * page;
  return std::min(host, kBytesOfAllRanks / static_cast<size_t>(ranks)) / kTokenPage * kTokenPage;
}

uint64_t random_token() {
  std::random_device random;
  return static_cast<uint64_t>(random()) << 32 | random();
}

}  // namespace

bool ArenaLocation::is_valid() const {
  return pid > 0 && fd >= 0 && bytes > 0 && bytes <= kBytesOfAllRanks && bytes % kTokenPage == 0;
}

HostMemory::HostMemory(std::vector<std::string> hosts, int rank, size_t arena_bytes)
    : hosts_(std::move(hosts)), rank_(rank) {
  const auto& host = hosts_[static_cast<size_t>(rank)];
  location_.pid = ::getpid();
  location_.bytes = arena_bytes > 0
                        ? arena_bytes
                        : default_arena_bytes(std::count(hosts_.begin(), hosts_.end(), host));
  location_.token = random_token();
  own_ = Segment::make(location_.bytes + kTokenPage);
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
        own ? own_ : Segment::open(location.pid, location.fd, location.bytes + kTokenPage);
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
  if (bytes > memory->bytes() || offset > memory->bytes() - bytes || offset % kTokenPage != 0) {
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
