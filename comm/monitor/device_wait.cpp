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

// How many ends tell the pace: some minutes of short steps, after which a long pause is forgotten.
constexpr size_t kEndsKept = 256;
// The first steps of a job, before its pace is known, seldom take longer.
constexpr milliseconds kLeastPatience{5000};
constexpr int kPartOfTimeout = 10;

using WatchedGroups = std::vector<std::weak_ptr<GroupMonitor>>;

// Removes the groups that have nothing to look at.
void look_at_devices(WatchedGroups& groups, DevicePace& pace, Clock::time_point now) {
  const auto is_done = [&](const std::weak_ptr<GroupMonitor>& group) {
    const auto alive = group.lock();
    return !alive || !alive->look_at_device(pace, now);
  };
  groups.erase(std::remove_if(groups.begin(), groups.end(), is_done), groups.end());
}

}  // namespace

bool DeviceWorks::add(
    c10d::Work& work, const CollectiveCall& call, Clock::time_point now, bool is_single_message) {
  auto result = work.getFutureResult();
  if (!result) return false;
  const std::lock_guard lock(mutex_);
  entries_.push_back({++added_, call, now, std::move(result), is_single_message});
  return !std::exchange(is_watched_, true);
}

DeviceWorks::State DeviceWorks::look() {
  State state;
  const std::lock_guard lock(mutex_);
  const auto has_ended = [&](const Entry& entry) {
    if (!entry.result->completed()) return false;
    if (!state.ended) state.ended = entry.since;
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

bool DeviceWorks::has_single_message() {
  const std::lock_guard lock(mutex_);
  return std::any_of(entries_.begin(), entries_.end(), [](const Entry& entry) {
    return entry.is_single_message && !entry.result->completed();
  });
}

void DevicePace::add_end(Clock::time_point started, Clock::time_point now) {
  const auto waited = idle_time(started, now);
  const std::lock_guard lock(mutex_);
  last_end_ = now;
  waits_.push_back(waited);
  if (waits_.size() > kEndsKept) waits_.pop_front();
}

milliseconds DevicePace::idle_time(Clock::time_point started, Clock::time_point now) const {
  const std::lock_guard lock(mutex_);
  return std::chrono::duration_cast<milliseconds>(now - std::max(started, last_end_));
}

milliseconds DevicePace::expected(milliseconds timeout) const {
  const std::lock_guard lock(mutex_);
  if (waits_.empty()) return milliseconds(0);
  return std::min(2 * *std::max_element(waits_.begin(), waits_.end()), timeout / kPartOfTimeout);
}

milliseconds DevicePace::patience(milliseconds timeout) const {
  const auto at_least = std::min(kLeastPatience, timeout / kPartOfTimeout);
  return std::max({expected(timeout), at_least, kWaitSlice});
}

const char* describe_end(const DeviceWorks::Entry& failed) {
  return result_of(failed) == Result::TIMEOUT ? "timed out" : "failed";
}

struct DeviceWatch::State {
  std::mutex mutex;  // guards the members below
  std::condition_variable changed;
  WatchedGroups added;
  bool stops = false;
  // Set once, or with a lock of its own.
  milliseconds look_every{0};
  std::function<Clock::time_point()> now;
  DevicePace pace;
};

DeviceWatch::DeviceWatch(milliseconds look_every, std::function<Clock::time_point()> now)
    : state_(std::make_shared<State>()) {
  state_->look_every = look_every;
  state_->now = std::move(now);
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

const DevicePace& DeviceWatch::pace() const { return state_->pace; }

void DeviceWatch::run(State& state) {
  WatchedGroups groups;
  std::unique_lock lock(state.mutex);
  while (true) {
    if (groups.empty()) {
      state.changed.wait(lock, [&] { return state.stops || !state.added.empty(); });
    } else {
      state.changed.wait_for(lock, state.look_every, [&] { return state.stops; });
    }
    if (state.stops) return;
    groups.insert(
        groups.end(), std::make_move_iterator(state.added.begin()),
        std::make_move_iterator(state.added.end()));
    state.added.clear();
    lock.unlock();
    look_at_devices(groups, state.pace, state.now());
    lock.lock();
  }
}

GroupMonitor::DeviceWait::DeviceWait(
    GroupMonitor& monitor, const DeviceWorks::Entry& entry, milliseconds waited)
    : number(entry.number),
      call(entry.call),
      where([what = to_text(entry.call.kind)] { return std::string(what); }),
      late(monitor, where, peers_of(call), nullptr, waited) {}

void GroupMonitor::watch(c10d::Work& work, const CollectiveCall& call, bool is_single_message) {
  if (!setup_.reports_results || !is_watching()) return;
  const auto self = weak_from_this();
  auto& job = *setup_.job;
  if (device_works_->add(work, call, job.now(), is_single_message)) job.device_watch().add(self);
}

bool GroupMonitor::look_at_device(DevicePace& pace, Clock::time_point now) noexcept {
  try {
    const auto state = device_works_->look();
    if (state.ended) pace.add_end(*state.ended, now);
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
    const auto idle = pace.idle_time(state.oldest->since, now);
    if (idle < pace.patience(setup_.timeout)) {
      device_wait_.reset();
      return true;
    }
    if (!device_wait_) device_wait_ = std::make_unique<DeviceWait>(*this, *state.oldest, idle);
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

/// Polls for as long as the device may take, so that a host that waits for it sends nothing.
///
/// \return  whether it is over.
bool GroupMonitor::poll_at_pace(
    c10::function_ref<bool()> is_over, std::chrono::microseconds poll_every) {
  if (!setup_.reports_results || !is_watching() || !device_works_->has_pending()) return false;
  auto& job = *setup_.job;
  const auto& pace = job.device_watch().pace();
  const auto begin = job.now();
  while (!is_over()) {
    check();
    if (pace.idle_time(begin, job.now()) >= pace.expected(setup_.timeout)) return false;
    std::this_thread::sleep_for(poll_every);
  }
  return true;
}

void GroupMonitor::wait_for_device(WaitPoint where) {
  if (!setup_.reports_results || !is_watching()) return;
  poll([this] { return !device_works_->has_pending(); }, where);
}

}  // namespace ddp
