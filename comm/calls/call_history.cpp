#include "calls/call_history.h"

#include <chrono>

namespace ddp {

uint64_t CallHistory::add(Lane lane, const CollectiveCall& call) {
  using std::chrono::microseconds;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const std::lock_guard lock(mutex_);
  auto& ring = this->ring(lane);
  ring.calls[ring.count % Ring::kSlots] = call;
  ring.times_us[ring.count % Ring::kSlots] = std::chrono::duration_cast<microseconds>(now).count();
  ring.threads[ring.count % Ring::kSlots] = std::this_thread::get_id();
  set_handle(lane, ring.count, nullptr);
  return ring.count++;
}

void CallHistory::remove_latest(Lane lane, uint64_t number) {
  const std::lock_guard lock(mutex_);
  auto& ring = this->ring(lane);
  if (ring.count == number + 1) ring.count = number;
}

CallList CallHistory::read(Lane lane) const {
  const std::lock_guard lock(mutex_);
  const auto& ring = rings_[static_cast<size_t>(lane)];
  CallList list;
  list.first = ring.first_kept();
  for (uint64_t number = list.first; number < ring.count; ++number) {
    list.calls.push_back(ring.calls[number % Ring::kSlots]);
    list.times_us.push_back(ring.times_us[number % Ring::kSlots]);
  }
  return list;
}

std::optional<CallHistory::Position> CallHistory::find(const void* handle) const {
  const std::lock_guard lock(mutex_);
  for (const auto lane : kLanes) {
    const auto& ring = rings_[static_cast<size_t>(lane)];
    // From the latest: a handle may have the address of one that was destroyed.
    for (auto number = ring.count; number-- > ring.first_kept();) {
      const auto slot = number % Ring::kSlots;
      if (ring.handles[slot] == handle) return Position{lane, number, ring.calls[slot]};
    }
  }
  return std::nullopt;
}

CallHistory::Progress CallHistory::progress() const {
  Progress progress;
  auto& threads = progress.threads;
  const std::lock_guard lock(mutex_);
  for (size_t lane = 0; lane < rings_.size(); ++lane) {
    const auto& ring = rings_[lane];
    progress.counts[lane] = ring.count;
    for (auto number = ring.first_kept(); number < ring.count; ++number) {
      threads.push_back(ring.threads[number % Ring::kSlots]);
    }
  }
  std::sort(threads.begin(), threads.end());
  threads.erase(std::unique(threads.begin(), threads.end()), threads.end());
  return progress;
}

}  // namespace ddp
