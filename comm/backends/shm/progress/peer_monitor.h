#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../memory/segment.h"
#include "../sync/control_block.h"
#include "process_watch.h"

namespace ddp::backends::shm {

/// What one rank has to know of another rank of its host.
struct Peer {
  int rank = 0;  // in the group, for messages
  std::shared_ptr<ProcessWatch> process;
  std::shared_ptr<Segment> memory;  // the rank's arena
};

/// Why a collective can complete no more.
struct Trouble {
  std::string what;   // as this rank sees it; empty: nothing is wrong
  std::string cause;  // where it began, which may be on another rank
};

/// Reads how far the ranks of a host have come, and whether they are still there. Writes this
/// rank's own state.
///
/// A collective is known by its number, which is the same on all ranks.
///
/// Thread safety: all members but stop().
class PeerMonitor {
 public:
  /// \param control  the segment of a ControlBlock, the same for all ranks.
  /// \param peers  by rank of the host, this rank included.
  PeerMonitor(int rank, std::shared_ptr<Segment> control, std::vector<Peer> peers);

  int size() const { return static_cast<int>(peers_.size()); }
  Doorbell& doorbell() const { return control_->doorbell; }
  RankState& own_state() const { return control_->of(rank_); }
  /// This rank's number in the group.
  int own_rank() const { return peers_[static_cast<size_t>(rank_)].rank; }

  /// How many reduce steps every rank has done.
  uint64_t reduced_by_all() const { return least(&RankState::reduced); }
  /// Whether every rank has announced the collective and come as far in the rounds of reduce steps
  /// as this rank, which reduces it next.
  bool may_reduce(uint64_t number) const;

  /// Each rank's memory for a collective that all ranks have announced.
  std::vector<std::byte*> buffers_for(uint64_t number) const;
  /// What differs between the ranks' descriptors of a collective; empty: nothing. All ranks read
  /// the same descriptors, so that all say the same.
  std::string mismatch(uint64_t number) const;
  /// Whether any rank announced the collective as carried by Gloo.
  bool uses_gloo(uint64_t number) const;
  std::string to_text(const Descriptor& descriptor) const;

  /// Whether another rank has stopped before it completed the collective. Its memory may hold
  /// anything then.
  bool has_peer_stopped(uint64_t number) const;
  /// The first rank without which the collective cannot complete, and that will not come any more.
  Trouble trouble(uint64_t number) const;
  /// Which ranks the collective waits for, for a message.
  std::string missing(uint64_t number) const;

  /// Says in this rank's state that it has stopped, if the state does not say so yet. By one thread
  /// at a time.
  void stop(Stopped how, uint64_t completed, const std::string& cause);

 private:
  using Counter = std::atomic<uint64_t> RankState::*;

  RankState& state_of(int rank) const { return control_->of(rank); }
  uint64_t least(Counter counter) const;
  bool has_stopped(int rank, uint64_t number) const;
  const Descriptor& descriptor_of(int rank, uint64_t number) const;
  std::string ranks_at_or_below(Counter counter, uint64_t number) const;

  const int rank_;  // of this process, in peers_
  const std::shared_ptr<Segment> control_memory_;
  ControlBlock* const control_;
  const std::vector<Peer> peers_;
};

}  // namespace ddp::backends::shm
