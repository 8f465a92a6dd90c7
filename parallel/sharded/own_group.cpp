#include "sharded/own_group.h"

#include <iterator>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/intrusive_ptr.h>
#include <ddp/collectives.h>
#include <ddp/internal/carrier_device.h>

namespace ddp {
namespace {

using WeakGroup = c10::weak_intrusive_ptr<c10d::ProcessGroup>;
using Key = std::pair<const void*, OwnOrder>;

std::mutex mutex;
std::map<Key, WeakGroup>& own_groups() {
  static std::map<Key, WeakGroup> groups;
  return groups;
}

ProcessGroup known_group(const Key& key) {
  const std::lock_guard lock(mutex);
  const auto found = own_groups().find(key);
  return found == own_groups().end() ? ProcessGroup() : found->second.lock();
}

}  // namespace

ProcessGroup own_group_of(const ProcessGroup& group, OwnOrder order) {
  if (!group || group->getSize() == 1) return group;
  const Key key(group.get(), order);
  auto known = known_group(key);
  // Another rank may have dropped its last model.
  auto all_know = at::full({1}, known ? 1 : 0, at::dtype(at::kLong).device(carrier_device(*group)));
  all_reduce(all_know, c10d::ReduceOp::MIN, group);
  if (all_know.item<int64_t>() == 1) return known;
  std::vector<int> ranks(static_cast<size_t>(group->getSize()));
  std::iota(ranks.begin(), ranks.end(), 0);
  auto own = new_group(ranks, group);
  const std::lock_guard lock(mutex);
  auto& groups = own_groups();
  for (auto at = groups.begin(); at != groups.end();) {
    at = at->second.expired() ? groups.erase(at) : std::next(at);
  }
  groups.insert_or_assign(key, WeakGroup(own));
  return own;
}

}  // namespace ddp
