#include "sharded/second_group.h"

#include <mutex>
#include <numeric>
#include <unordered_map>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/intrusive_ptr.h>
#include <ddp/collectives.h>

namespace ddp {
namespace {

using WeakGroup = c10::weak_intrusive_ptr<c10d::ProcessGroup>;

std::mutex mutex;
std::unordered_map<const void*, WeakGroup>& second_groups() {
  static std::unordered_map<const void*, WeakGroup> groups;
  return groups;
}

ProcessGroup known_second_group(const ProcessGroup& group) {
  const std::lock_guard lock(mutex);
  const auto found = second_groups().find(group.get());
  return found == second_groups().end() ? ProcessGroup() : found->second.lock();
}

}  // namespace

ProcessGroup second_group_of(const ProcessGroup& group) {
  if (group->getSize() == 1) return group;
  auto known = known_second_group(group);
  // Another rank may have dropped its last model.
  auto all_know = at::full({1}, known ? 1 : 0, at::kLong);
  all_reduce(all_know, c10d::ReduceOp::MIN, group);
  if (all_know.item<int64_t>() == 1) return known;
  std::vector<int> ranks(static_cast<size_t>(group->getSize()));
  std::iota(ranks.begin(), ranks.end(), 0);
  auto second = new_group(ranks, group);
  const std::lock_guard lock(mutex);
  second_groups().insert_or_assign(group.get(), WeakGroup(second));
  return second;
}

}  // namespace ddp
