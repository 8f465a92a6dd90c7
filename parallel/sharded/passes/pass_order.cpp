#include "sharded/passes/pass_order.h"

#include <algorithm>

namespace ddp {

size_t PassOrder::enter(size_t unit, bool has_backward, int64_t call) {
  uses_.push_back({unit, time_++, -1, has_backward, call});
  return uses_.size() - 1;
}

void PassOrder::leave(size_t use) { uses_[use].exit = time_++; }

std::vector<size_t> PassOrder::units() const {
  std::vector<size_t> units;
  for (const auto& use : uses_) {
    if (std::find(units.begin(), units.end(), use.unit) == units.end()) units.push_back(use.unit);
  }
  return units;
}

int64_t PassOrder::first_entry(size_t unit) const {
  const auto of_unit = [&](const Use& use) { return use.unit == unit; };
  return std::find_if(uses_.begin(), uses_.end(), of_unit)->entry;
}

size_t PassOrder::last_in_call(size_t unit, int64_t call) const {
  for (size_t i = uses_.size(); call != 0 && i-- > 0;) {
    if (uses_[i].unit == unit && uses_[i].call == call) return i;
  }
  return npos;
}

bool PassOrder::is_one_of_several(size_t use) const {
  const auto& given = uses_[use];
  return given.call != 0 && std::count_if(uses_.begin(), uses_.end(), [&](const Use& other) {
                              return other.unit == given.unit && other.call == given.call;
                            }) > 1;
}

int64_t PassOrder::begin_of(size_t use) const {
  auto begin = uses_[use].entry;
  for (const auto& other : uses_) {
    if (other.call != 0 && other.call == uses_[use].call) begin = std::min(begin, other.entry);
  }
  return begin;
}

int64_t PassOrder::end_of(size_t use) const {
  auto end = uses_[use].exit;
  for (const auto& other : uses_) {
    if (other.call != 0 && other.call == uses_[use].call) end = std::max(end, other.exit);
  }
  return end;
}

std::vector<size_t> PassOrder::backward() const {
  std::vector<size_t> order;
  for (size_t i = 0; i < uses_.size(); ++i) {
    if (uses_[i].has_backward) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return uses_[a].exit > uses_[b].exit;
  });
  return order;
}

}  // namespace ddp
