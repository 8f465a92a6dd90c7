#include "sharded/pass_order.h"

#include <algorithm>

namespace ddp {

size_t PassOrder::enter(size_t unit, bool without_graph) {
  uses_.push_back({unit, time_++, -1, without_graph});
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

size_t PassOrder::without_graph_before(size_t unit, int64_t time) const {
  for (size_t i = uses_.size(); i-- > 0;) {
    const auto& use = uses_[i];
    if (use.unit == unit && use.without_graph && use.exit < time) return i;
  }
  return npos;
}

std::vector<size_t> PassOrder::backward() const {
  std::vector<size_t> order;
  for (size_t i = 0; i < uses_.size(); ++i) {
    if (!uses_[i].without_graph) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return uses_[a].exit > uses_[b].exit;
  });
  return order;
}

}  // namespace ddp
