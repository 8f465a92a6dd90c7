// Collectives that a stream waits for: no thread of the program waits for them on the host.
#pragma once

#include <chrono>
#include <cstdint>
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
  };
  struct State {
    std::optional<Entry> oldest;  // that has not ended
    std::optional<Entry> failed;  // that the backend has ended with an error, or after its timeout
    bool any_ended = false;
  };

  /// Adds a collective of a backend whose watchdog reports results.
  ///
  /// \return  whether look() has to be called from now on: until it finds nothing that has not
  ///          ended.
  bool add(c10d::Work& work, const CollectiveCall& call);

  /// Forgets the collectives that have ended. To be called from one thread.
  State look();

  /// Whether there is a collective that has not ended, or has failed.
  bool has_pending();

 private:
  std::mutex mutex_;  // guards the members below
  std::vector<Entry> entries_;
  uint64_t added_ = 0;
  bool is_watched_ = false;
};

/// How long a device has had nothing else to do than the collective that the host started at
/// `started`: since then, or since `last_end` of a collective of the job. A host that runs ahead of
/// its device is not late.
std::chrono::milliseconds idle_time(
    DeviceWorks::Clock::time_point started, DeviceWorks::Clock::time_point last_end,
    DeviceWorks::Clock::time_point now);

/// "timed out" or "failed": how the backend ended a collective of State::failed.
const char* describe_end(const DeviceWorks::Entry& failed);

/// Looks at groups whose collectives a stream waits for.
///
/// Such a wait holds up no thread that could notice a failed rank: the program waits for its device
/// in `loss.item()` or `cudaStreamSynchronize`. While collectives have not ended, the thread here
/// looks at their groups twice a second. A failure that it finds aborts the job's groups: their
/// kernels end, the program's wait returns, and its next call in a group throws.
///
/// Threads: all members, from any thread. The destructor may run on the watch's own thread.
class DeviceWatch {
 public:
  /// \throws std::system_error  if no thread can start.
  DeviceWatch();
  ~DeviceWatch();
  C10_DISABLE_COPY_AND_ASSIGN(DeviceWatch);

  /// Looks at the group until it has nothing to look at: GroupMonitor::look_at_device().
  void add(const std::weak_ptr<GroupMonitor>& group);

 private:
  struct State;

  static void run(State& state);

  const std::shared_ptr<State> state_;  // shared with the thread
  std::thread thread_;
};

/// A collective on a device that has not ended for longer than kWaitSlice.
struct GroupMonitor::DeviceWait {
  DeviceWait(GroupMonitor& monitor, const DeviceWorks::Entry& entry);

  const uint64_t number;
  const CollectiveCall call;
  const std::function<std::string()> where;
  LateWait late;
};

}  // namespace ddp
