#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../memory/arena.h"
#include "../progress/peer_monitor.h"
#include "../sync/control_block.h"

namespace ddp::backends::shm {

/// How many bytes the ranks of a host may map together, in processes whose stack has that address:
/// a part of all addresses, which are 2^47 on x86-64 and may be 2^39 on aarch64.
size_t mappable_bytes(uintptr_t stack_address);

/// Where the other ranks of a host find a rank's arena.
struct ArenaLocation {
  pid_t pid = 0;
  int fd = -1;
  size_t bytes = 0;    // of the arena
  uint64_t token = 0;  // random; stored after the arena, to tell it from another job's

  bool is_valid() const;
};

/// The memory that a rank shares with the ranks of its host: its own arena and, mapped once, those
/// of the others. A group that is made of no other group makes it. The groups that are made of that
/// group use it too, so they map nothing and watch no processes.
///
/// The control block of a group lies in the arena of the host's leader. Every rank that opens it
/// counts as a user until it drops it, and the leader's arena gets it back after the last one. A
/// rank that is killed leaks the block.
///
/// Thread safety: all members, after map().
class HostMemory : public std::enable_shared_from_this<HostMemory> {
 public:
  /// Makes this rank's arena.
  ///
  /// \param hosts  by rank, the name of its host.
  /// \param arena_bytes  whole pages; 0: as much memory as the host has.
  HostMemory(std::vector<std::string> hosts, int rank, size_t arena_bytes);
  /// No group uses the memory any more. Tensors may, but no memory is reused.
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  const ArenaLocation& location() const { return location_; }
  /// Maps the arenas of the other ranks of this host, and watches their processes. Called once.
  ///
  /// \param locations  by rank.
  /// \throws c10::Error  if a rank's memory is not there, or its process cannot be watched.
  void map(const std::vector<ArenaLocation>& locations);

  const std::vector<std::string>& hosts() const { return hosts_; }
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  const Peer& peer(int rank) const { return peers_[static_cast<size_t>(rank)]; }

  /// Reserves a control block in this rank's arena, for so many ranks that will open it.
  ///
  /// \return  its offset in the arena.
  /// \throws c10::OutOfMemoryError  if the arena is full.
  size_t reserve_control(int ranks);

  /// Opens a control block that `leader`, a rank of this host, reserved for `ranks` ranks.
  ///
  /// \return  null if none can be there. The block outlives its last user on any rank.
  std::shared_ptr<ControlBlock> open_control(int leader, size_t offset, int ranks);

 private:
  void retire(ControlBlock* control, size_t bytes);
  void release_unused_locked();

  const std::vector<std::string> hosts_;
  const int rank_;
  ArenaLocation location_;
  std::shared_ptr<Segment> own_;
  std::shared_ptr<Arena> arena_;
  std::vector<Peer> peers_;  // by rank; those of other hosts have no memory
  std::mutex mutex_;         // guards retired_
  // The control blocks that this rank reserved and uses no more, and their bytes; others may.
  std::vector<std::pair<ControlBlock*, size_t>> retired_;
};

}  // namespace ddp::backends::shm
