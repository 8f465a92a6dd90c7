#pragma once

#include <memory>
#include <thread>

namespace ddp {

class GroupMonitor;

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
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  /// Looks at the group until it has nothing to look at: GroupMonitor::look_at_device().
  void add(const std::weak_ptr<GroupMonitor>& group);

 private:
  struct State;

  static void run(State& state);

  const std::shared_ptr<State> state_;  // shared with the thread
  std::thread thread_;
};

}  // namespace ddp
