#include "monitor/device/device_works.h"

#include <algorithm>
#include <utility>

namespace ddp {
namespace {

using Result = c10d::WorkResult;

Result result_of(const DeviceWorks::Entry& entry) {
  if (entry.result->hasError()) return Result::COMM_ERROR;
  return static_cast<Result>(entry.result->constValue().toInt());
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

const char* describe_end(const DeviceWorks::Entry& failed) {
  return result_of(failed) == Result::TIMEOUT ? "timed out" : "failed";
}

}  // namespace ddp
