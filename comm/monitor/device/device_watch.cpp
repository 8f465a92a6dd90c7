#include "monitor/device/device_watch.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <iterator>
#include <mutex>
#include <utility>
#include <vector>

#include <ddp/internal/group_monitor.h>
#include <ddp/internal/system/start_thread.h>

namespace ddp {
namespace {

constexpr std::chrono::milliseconds kDeviceLookEvery{500};

using WatchedGroups = std::vector<std::weak_ptr<GroupMonitor>>;

// Removes the groups that have nothing to look at.
void look_at_devices(WatchedGroups& groups) {
  const auto is_done = [](const std::weak_ptr<GroupMonitor>& group) {
    const auto alive = group.lock();
    return !alive || !alive->look_at_device();
  };
  groups.erase(std::remove_if(groups.begin(), groups.end(), is_done), groups.end());
}

}  // namespace

struct DeviceWatch::State {
  std::mutex mutex;  // guards the members below
  std::condition_variable changed;
  WatchedGroups added;
  bool stops = false;
};

DeviceWatch::DeviceWatch() : state_(std::make_shared<State>()) {
  thread_ = start_thread([state = state_] { run(*state); });
}

DeviceWatch::~DeviceWatch() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stops = true;
  }
  state_->changed.notify_all();
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();  // it dropped the job's last group
  } else {
    thread_.join();
  }
}

void DeviceWatch::add(const std::weak_ptr<GroupMonitor>& group) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->added.push_back(group);
  }
  state_->changed.notify_all();
}

void DeviceWatch::run(State& state) {
  WatchedGroups groups;
  std::unique_lock lock(state.mutex);
  while (true) {
    if (groups.empty()) {
      state.changed.wait(lock, [&] { return state.stops || !state.added.empty(); });
    } else {
      state.changed.wait_for(lock, kDeviceLookEvery, [&] { return state.stops; });
    }
    if (state.stops) return;
    groups.insert(
        groups.end(), std::make_move_iterator(state.added.begin()),
        std::make_move_iterator(state.added.end()));
    state.added.clear();
    lock.unlock();
    look_at_devices(groups);
    lock.lock();
  }
}

}  // namespace ddp
