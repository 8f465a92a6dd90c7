// Collectives that a stream waits for: no thread of the program waits for them on the host.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "calls/collective_call.h"
#include "monitor/late_wait.h"

namespace ddp {

/// The collectives of a group that have started on a device, and are not known to have ended.
///
/// It keeps Work::getFutureResult() of each, which the backend's watchdog completes. Unlike the
/// Work, that holds no tensors: a tensor that the program has dropped can be used again in the
/// order of its stream, long before the device is there.
///
/// Threads: all members, from any thread.
class DeviceWorks {
 public:
  using Clock = std::chrono::steady_clock;

  struct Entry {
    uint64_t number = 0;  // of the collectives that were added
    CollectiveCall call;
    Clock::time_point since{};
    c10::intrusive_ptr<c10::ivalue::Future> result;
    bool is_single_message = false;
  };
  struct State {
    std::optional<Entry> oldest;  // that has not ended
    std::optional<Entry> failed;  // that the backend has ended with an error, or after its timeout
    std::optional<Clock::time_point> ended;  // when the host called the first that has ended
  };

  /// Adds a collective of a backend whose watchdog reports results.
  ///
  /// \param now  when the host called it.
  /// \return  whether look() has to be called from now on: until it finds nothing that has not
  ///          ended.
  bool add(
      c10d::Work& work, const CollectiveCall& call, Clock::time_point now,
      bool is_single_message = false);

  /// Forgets the collectives that have ended. To be called from one thread.
  State look();

  /// Whether there is a collective that has not ended, or has failed.
  bool has_pending();
  /// Whether one that has not ended is a message by itself.
  bool has_single_message();

 private:
  std::mutex mutex_;  // guards the members below
  std::vector<Entry> entries_;
  uint64_t added_ = 0;
  bool is_watched_ = false;
};

/// How often a rank's device ends a collective of the job, in whatever group.
///
/// A host runs ahead of its device, so a collective may be old that could not begin yet. It counts
/// from the end of the one before, and is not late for as long as it takes to compute a step, which
/// the ends before it tell.
///
/// Threads: all members, from any thread.
class DevicePace {
 public:
  using Clock = DeviceWorks::Clock;
  using Milliseconds = std::chrono::milliseconds;

  /// Collectives have ended, the first of which the host called at `started`.
  void add_end(Clock::time_point started, Clock::time_point now);
  /// For how long no collective has ended while the device had one that the host called at
  /// `started`.
  Milliseconds idle_time(Clock::time_point started, Clock::time_point now) const;
  /// How long that may last: twice the longest time of the latest ends; 0: nothing is known.
  ///
  /// \param timeout  of the group. At most a tenth of it: a rank that does not come is named.
  Milliseconds expected(Milliseconds timeout) const;
  /// The same before anything of a wait is sent: at least five seconds where the timeout allows it.
  Milliseconds patience(Milliseconds timeout) const;

 private:
  mutable std::mutex mutex_;  // guards the members below
  Clock::time_point last_end_{};
  std::deque<Milliseconds> waits_;  // before the latest ends
};

/// "timed out" or "failed": how the backend ended a collective of State::failed.
const char* describe_end(const DeviceWorks::Entry& failed);

/// Looks at groups whose collectives a stream waits for.
///
/// Such a wait holds up no thread that could notice a failed rank: the program waits for its device
/// in `loss.item()` or `cudaStreamSynchronize`. While collectives have not ended, the thread here
/// looks at their groups twice a second, and sends nothing while the device keeps its pace. A
/// failure that it finds aborts the job's groups: their kernels end, the program's wait returns,
/// and its next call in a group throws.
///
/// Threads: all members, from any thread. The destructor may run on the watch's own thread.
class DeviceWatch {
 public:
  /// \throws std::system_error  if no thread can start.
  DeviceWatch(
      std::chrono::milliseconds look_every, std::function<DevicePace::Clock::time_point()> now);
  ~DeviceWatch();
  C10_DISABLE_COPY_AND_ASSIGN(DeviceWatch);

  /// Looks at the group until it has nothing to look at: GroupMonitor::look_at_device().
  void add(const std::weak_ptr<GroupMonitor>& group);
  const DevicePace& pace() const;

 private:
  struct State;

  static void run(State& state);

  const std::shared_ptr<State> state_;  // shared with the thread
  std::thread thread_;
};

/// A collective on a device that is late.
struct GroupMonitor::DeviceWait {
  DeviceWait(
      GroupMonitor& monitor, const DeviceWorks::Entry& entry, std::chrono::milliseconds waited);

  const uint64_t number;
  const CollectiveCall call;
  const std::function<std::string()> where;
  LateWait late;
};

}  // namespace ddp
