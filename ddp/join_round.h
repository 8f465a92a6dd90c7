#pragma once

#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/process_group.h>

namespace ddp {

/// What one rank says at the beginning of an iteration, and where that is a forward pass, again at
/// the beginning of its backward pass.
struct RankEntry {
  bool active = false;   // it has input
  bool reduces = false;  // its backward pass will be averaged
  double samples = 0;    // since the last averaged backward pass, with this iteration's
  int place = 0;         // in an iteration of the join; see place_of
};

/// The place in an iteration of a join where its joinable number `joinable` communicates.
constexpr int place_of(int joinable, bool in_backward) {
  return 2 * joinable + (in_backward ? 1 : 0);
}

/// What all ranks said. Every rank acts on it in the same way, with input or without.
class JoinRound {
 public:
  explicit JoinRound(std::vector<RankEntry> by_rank) : by_rank_(std::move(by_rank)) {}

  int active() const;
  int size() const { return static_cast<int>(by_rank_.size()); }
  /// The highest rank with input.
  int last_active() const;
  bool reduces() const;
  double samples() const;

  /// How the ranks disagree about what they will communicate; "" when they do not.
  std::string disagreement() const;

 private:
  std::string different_places() const;

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
