#pragma once

#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/process_group.h>

namespace ddp {

/// A place in a join where the ranks communicate; a round compares it before.
struct JoinPlace {
  enum class Event {
    Iteration,  // of a user's own class, or a sharded optimizer's step
    Forward,    // only with throw_on_early_termination
    Backward,   // averaged
  };

  int joinable = 0;  // position in the list of joinables
  Event event = Event::Backward;
};

/// The message of one rank in a round.
struct RankStatus {
  bool active = false;   // the rank has input
  bool reduces = false;  // its backward pass will be averaged
  bool adds = false;     // to averages of earlier passes, which `.grad` still holds
  double samples = 0;    // since the last averaged backward pass, including this iteration's
  JoinPlace place = {};  // meaningless where the rank has no input
};

/// The status of all ranks. Every rank derives the same decisions from it, with input or without.
class JoinRound {
 public:
  explicit JoinRound(std::vector<RankStatus> by_rank) : by_rank_(std::move(by_rank)) {}

  int active() const;
  int size() const { return static_cast<int>(by_rank_.size()); }
  /// The highest rank with input.
  int last_active() const;
  JoinPlace place() const { return by_rank_[last_active()].place; }
  /// Whether the averages of this pass are added to earlier ones.
  bool adds() const;
  double samples() const;
  std::vector<double> samples_by_rank() const;

  /// How the ranks with input differ in what they will communicate; "" where they do not.
  std::string disagreement() const;
  /// An error text with the place of each rank; "" where all are at one place.
  std::string different_places(bool with_ended) const;

 private:
  std::vector<RankStatus> by_rank_;
};

/// Sends `mine` to all ranks, and returns theirs.
///
/// \throws AgreedError  when the ranks disagree.
///
/// Collective: yes, one all-reduce of 16 bytes a rank.
JoinRound all_reduce_status(
    const RankStatus& mine, const ProcessGroup& group, c10::Device device, GroupMonitor& monitor);

}  // namespace ddp
