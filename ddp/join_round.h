#pragma once

#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/process_group.h>

namespace ddp {

/// A place in a join where the ranks communicate. They agree on it before they do.
struct JoinPlace {
  enum class Event {
    Iteration,  // of a class of the user's own, or a sharded optimizer's step
    Forward,    // with throw_on_early_termination
    Backward,   // that is averaged
  };

  int joinable = 0;  // its position in the list of those that join
  Event event = Event::Backward;
};

/// What one rank says before it communicates.
struct RankEntry {
  bool active = false;   // it has input
  bool reduces = false;  // its backward pass will be averaged
  double samples = 0;    // since the last averaged backward pass, with this iteration's
  JoinPlace place = {};  // of no meaning where it has no input
};

/// What all ranks said. Every rank acts on it in the same way, with input or without.
class JoinRound {
 public:
  explicit JoinRound(std::vector<RankEntry> by_rank) : by_rank_(std::move(by_rank)) {}

  int active() const;
  int size() const { return static_cast<int>(by_rank_.size()); }
  /// The highest rank with input.
  int last_active() const;
  /// Where the ranks with input are.
  JoinPlace place() const { return by_rank_[last_active()].place; }
  double samples() const;

  /// How the ranks with input disagree about what they will communicate; "" when they do not.
  std::string disagreement() const;
  /// Where each rank is, as an error text; "" where all of them are at one place.
  std::string different_places(bool with_ended) const;

 private:
  std::vector<RankEntry> by_rank_;
};

/// Tells all ranks `mine`, and learns what they say.
///
/// \throws AgreedError  when the ranks disagree.
///
/// Collective: yes, one all-reduce of 16 bytes a rank.
JoinRound exchange_entries(
    const RankEntry& mine, const ProcessGroup& group, c10::Device device, GroupMonitor& monitor);

}  // namespace ddp
