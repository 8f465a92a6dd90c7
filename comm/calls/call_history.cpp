#include "calls/call_history.h"

#include <algorithm>
#include <chrono>

namespace ddp {

uint64_t CallHistory::add(Lane lane, const CollectiveCall& call) {
  using std::chrono::microseconds;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const std::lock_guard lock(mutex_);
  auto& ring = this->ring(lane);
  ring.calls[ring.count % Ring::kSlots] = call;
  ring.times_us[ring.count % Ring::kSlots] = std::chrono::duration_cast<microseconds>(now).count();
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
  list.first = ring.count - std::min<uint64_t>(ring.count, kKept);
  for (uint64_t number = list.first; number < ring.count; ++number) {
    list.calls.push_back(ring.calls[number % Ring::kSlots]);
    list.times_us.push_back(ring.times_us[number % Ring::kSlots]);
  }
  return list;
}

}  // namespace ddp
