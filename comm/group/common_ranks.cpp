#include <ddp/internal/common_ranks.h>

#include <algorithm>

#include "group/monitored_group.h"

namespace ddp {

std::optional<int64_t> count_common_ranks(
    const c10d::ProcessGroup& a, const c10d::ProcessGroup& b) {
  if (&a == &b) return a.getSize();
  const auto* one = dynamic_cast<const MonitoredGroup*>(&a);
  const auto* other = dynamic_cast<const MonitoredGroup*>(&b);
  if (!one || !other || one->recipe().job != other->recipe().job) return std::nullopt;
  const auto& ranks = one->recipe().world_ranks;
  const auto& others = other->recipe().world_ranks;
  return std::count_if(ranks.begin(), ranks.end(), [&](int rank) {
    return std::find(others.begin(), others.end(), rank) != others.end();
  });
}

}  // namespace ddp
