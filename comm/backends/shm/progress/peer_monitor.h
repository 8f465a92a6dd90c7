#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ddp/internal/system/fd.h>

#include "../memory/segment.h"
#include "../sync/control_block.h"

namespace ddp::backends::shm {

/// Detects the end of another process, by a pidfd.
class ProcessWatch {
 public:
  /// Watches nothing if `pid` is this process.
  ///
  /// \throws c10::Error  if there is no such process, or the kernel does not allow watching it:
  ///         before Linux 5.3, or in some containers.
  explicit ProcessWatch(pid_t pid);

  pid_t pid() const { return pid_; }
  bool has_ended() const;

 private:
  pid_t pid_;
  Fd process_;  // readable once it has ended
};

/// Another rank of this rank's host.
struct Peer {
  int rank = 0;  // in the group, for messages
  std::shared_ptr<ProcessWatch> process;
  std::shared_ptr<Segment> memory;  // the rank's arena
};

/// Why a collective cannot complete.
struct PeerFailure {
  std::string what;   // as this rank sees it; empty: no failure
  std::string cause;  // the original failure, which may be on another rank
};

/// Reads the progress of the ranks of a host, and whether they still exist. Writes this rank's own
/// state.
///
/// A collective is identified by its number, which is the same on all ranks.
///
/// Thread safety: all members but stop().
class PeerMonitor {
 public:
  /// \param control  the same for all ranks.
  /// \param peers  by rank of the host, this rank included.
  PeerMonitor(int rank, std::shared_ptr<ControlBlock> control, std::vector<Peer> peers);

  int size() const { return static_cast<int>(peers_.size()); }
  Doorbell& doorbell() const { return control_->doorbell; }
  RankState& own_state() const { return control_->of(rank_); }
  const ControlBlock& control() const { return *control_; }
  /// This rank's place among the ranks of the host.
  int own_place() const { return rank_; }
  /// A rank's number in the group, by its place.
  int rank_at(int place) const { return peers_[static_cast<size_t>(place)].rank; }
  int own_rank() const { return rank_at(rank_); }
  /// A rank's arena.
  std::byte* memory_of(int place) const {
    return peers_[static_cast<size_t>(place)].memory->data();
  }

  /// How many reduce steps every rank has done.
  uint64_t reduced_by_all() const { return minimum(&RankState::reduced); }
  /// Whether every rank has announced the collective and finished as many rounds of reduce steps as
  /// this rank, which reduces it next.
  bool may_reduce(uint64_t number) const;

  /// Each rank's memory for a collective that all ranks have announced.
  std::vector<std::byte*> buffers_for(uint64_t number) const;
  /// How the ranks' descriptors of a collective differ; empty: they do not. All ranks read the same
  /// descriptors, so that all return the same text.
  std::string mismatch(uint64_t number) const;
  /// Whether any rank announced that Gloo carries the collective.
  bool uses_gloo(uint64_t number) const;
  std::string to_text(const Descriptor& descriptor) const;

  /// Whether another rank has stopped before it completed the collective. Its memory may then hold
  /// anything.
  bool has_peer_stopped(uint64_t number) const;
  /// The first rank that the collective needs and that cannot complete it any more.
  PeerFailure find_failure(uint64_t number) const;
  bool has_stopped(int place) const { return has_stopped(place, UINT64_MAX); }
  /// Why nothing more comes from the rank; empty: it may.
  PeerFailure failure_of(int place) const { return failure_of(place, UINT64_MAX); }
  /// Names the ranks that the collective waits for, for a message.
  std::string describe_missing_ranks(uint64_t number) const;

  /// Records in this rank's state that it has stopped, unless that is recorded already. To be
  /// called by one thread at a time.
  void stop(Stopped how, uint64_t completed, const std::string& cause);

 private:
  using Counter = std::atomic<uint64_t> RankState::*;

  RankState& state_of(int rank) const { return control_->of(rank); }
  uint64_t minimum(Counter counter) const;
  bool has_stopped(int rank, uint64_t number) const;
  PeerFailure failure_of(int rank, uint64_t number) const;
  const Descriptor& descriptor_of(int rank, uint64_t number) const;
  std::string ranks_at_or_below(Counter counter, uint64_t number) const;

  const int rank_;  // of this process, in peers_
  const std::shared_ptr<ControlBlock> control_;
  const std::vector<Peer> peers_;
};

}  // namespace ddp::backends::shm
