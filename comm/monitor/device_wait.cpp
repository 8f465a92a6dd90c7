#include "monitor/device_wait.h"

#include <algorithm>
#include <condition_variable>
#include <iterator>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/system/start_thread.h>

namespace ddp {
namespace {

using namespace monitor;

// A rank that sends or receives waits for one other: it may end, and so may a root, once its part
// is done, which the backend knows.
Peers peers_of(const CollectiveCall& call) {
  switch (call.kind) {
    case CollectiveKind::Broadcast:
    case CollectiveKind::Reduce:
    case CollectiveKind::Gather:
    case CollectiveKind::Scatter:
    case CollectiveKind::Message:
      return Peers::Some;
    default:
      return Peers::All;
  }
}

using Result = c10d::WorkResult;

Result result_of(const DeviceWorks::Entry& entry) {
  if (entry.result->hasError()) return Result::COMM_ERROR;
  return static_cast<Result>(entry.result->constValue().toInt());
}

constexpr std::chrono::milliseconds kDeviceLookEvery{500};

using WatchedGroups = std::vector<std::weak_ptr<GroupMonitor>>;

// Removes the groups that have nothing to look at.
void look_at_devices(WatchedGroups& groups, Clock::time_point& last_end) {
  const auto is_done = [&](const std::weak_ptr<GroupMonitor>& group) {
    const auto alive = group.lock();
    return !alive || !alive->look_at_device(last_end);
  };
  groups.erase(std::remove_if(groups.begin(), groups.end(), is_done), groups.end());
}

}  // namespace

bool DeviceWorks::add(c10d::Work& work, const CollectiveCall& call) {
  auto result = work.getFutureResult();
  if (!result) return false;
  const std::lock_guard lock(mutex_);
  entries_.push_back({++added_, call, Clock::now(), std::move(result)});
  return !std::exchange(is_watched_, true);
}

DeviceWorks::State DeviceWorks::look() {
  State state;
  const std::lock_guard lock(mutex_);
  const auto has_ended = [&](const Entry& entry) {
    if (!entry.result->completed()) return false;
    state.any_ended = true;
    if (!state.failed && result_of(entry) != Result::SUCCESS) state.failed = entry;
    return true;
  };
  entries_.erase(std::remove_if(entries_.begin(), entries_.end(), has_ended), entries_.end());
  is_watched_ = !entries_.empty();
  if (is_watched_) state.oldest = entries_.front();
  return state;
}

bool DeviceWorks::has_pending() {
  const std::lock_guard lock(mutex_);
  return std::any_of(entries_.begin(), entries_.end(), [](const Entry& entry) {
    return !entry.result->completed() || result_of(entry) != Result::SUCCESS;
  });
}

milliseconds idle_time(
    Clock::time_point started, Clock::time_point last_end, Clock::time_point now) {
  return std::chrono::duration_cast<milliseconds>(now - std::max(started, last_end));
}

const char* describe_end(const DeviceWorks::Entry& failed) {
  return result_of(failed) == Result::TIMEOUT ? "timed out" : "failed";
}

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
  Clock::time_point last_end{};  // of a collective of the job, as it was seen
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
    look_at_devices(groups, last_end);
    lock.lock();
  }
}

GroupMonitor::DeviceWait::DeviceWait(GroupMonitor& monitor, const DeviceWorks::Entry& entry)
    : number(entry.number),
      call(entry.call),
      where([what = to_text(entry.call.kind)] { return std::string(what); }),
      late(monitor, where, peers_of(call), nullptr) {}

void GroupMonitor::watch(c10d::Work& work, const CollectiveCall& call) {
  if (!setup_.reports_results || !is_watching()) return;
  const auto self = weak_from_this();
  if (device_works_->add(work, call)) setup_.job->device_watch().add(self);
}

bool GroupMonitor::look_at_device(Clock::time_point& last_end) noexcept {
  try {
    const auto state = device_works_->look();
    if (state.any_ended) last_end = Clock::now();
    if (aborted()) {
      device_wait_.reset();
      return false;
    }
    if (state.failed) {
      const auto where = [&] { return to_text(state.failed->call); };
      throw_failed(backend_error(describe_end(*state.failed)), where);
    }
    if (device_wait_ && (!state.oldest || device_wait_->number != state.oldest->number)) {
      device_wait_.reset();
    }
    if (!state.oldest) return false;
    if (idle_time(state.oldest->since, last_end, Clock::now()) < kWaitSlice) {
      device_wait_.reset();
      return true;
    }
    if (!device_wait_) device_wait_ = std::make_unique<DeviceWait>(*this, *state.oldest);
    device_wait_->late.check_group([&](milliseconds at_most) {
      std::this_thread::sleep_for(at_most);
      return state.oldest->result->completed();  // the next look takes it
    });
    return true;
  } catch (const std::exception&) {
    // The failure is recorded, and the groups are aborted: the program's next call throws.
    device_wait_.reset();
    return false;
  }
}

void GroupMonitor::wait_for_device(WaitPoint where) {
  if (!setup_.reports_results || !is_watching()) return;
  poll([this] { return !device_works_->has_pending(); }, where);
}

}  // namespace ddp
