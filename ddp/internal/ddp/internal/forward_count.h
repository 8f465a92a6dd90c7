#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ddp/internal/group_monitor.h>

namespace ddp {

/// The passes of a wrapper.
inline const StepsText kTrainingForwards{
    "began a training forward pass that",
    "Every rank has to train on as many batches, or in join()"};

/// A wrapper's count of its training forward passes whose gradients are averaged. All ranks begin
/// equally many between two averaged backward passes. Or a sharded model's of all its forward
/// passes, with a restart at each.
///
/// While a rank waits late in a collective of the group, it reads which forward passes threw on
/// other ranks. A pass that this rank has begun and that did not throw here ends the wait; one that
/// threw on every rank does not, so the group stays usable. Each wrapper of a group has a count of
/// its own, so the wrappers' passes may alternate in any order.
///
/// Threads: all members, from any thread.
class ForwardCount {
 public:
  /// All ranks make the counts of a group in the same order.
  explicit ForwardCount(std::shared_ptr<GroupMonitor> monitor, StepsText text = kTrainingForwards);

  void begin();
  void fail(const std::string& why) noexcept;
  /// Where the current pass threw: waits until it has thrown on every rank.
  ///
  /// \throws c10::DistBackendError  when a rank waits for this one, because it did not throw there.
  void await_failures();
  /// An averaged backward pass has ended. All ranks begin anew, because they may have had different
  /// numbers of forward passes before it (in a join).
  void restart();
  /// The passes begun since the last restart.
  uint64_t since_restart() const;

 private:
  class Steps;

  const std::shared_ptr<GroupMonitor> monitor_;
  const std::shared_ptr<Steps> steps_;  // shared with jobs that may outlive this
};

struct FailedForward {
  int rank = -1;
  uint64_t number = 0;  // of the rank's forward passes
  std::string why;
};

/// Appends `forward` to the list in `store` of the wrapper with the number `wrapper`, unless
/// another rank's with that number is there: a pass that throws on all ranks makes one entry, in a
/// world of any size.
void record_failed_forward(c10d::Store& store, int wrapper, const FailedForward& forward);

/// Appends the entries that are new to `known`, which holds the beginning of the list.
///
/// Cost: one request to the store while the list is empty; else two, and two for each new entry.
void read_failed_forwards(c10d::Store& store, int wrapper, std::vector<FailedForward>& known);

}  // namespace ddp
