#include "sharded/own_group.h"

#include <iterator>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/intrusive_ptr.h>
#include <ddp/collectives.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>

namespace ddp {
namespace {

using Key = std::pair<const void*, OwnOrder>;

struct Entry {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  int64_t requests = 0;
};

std::mutex mutex;
std::map<Key, Entry>& own_groups() {
  static std::map<Key, Entry> groups;
  return groups;
}

OwnGroup known_group(const Key& key) {
  const std::lock_guard lock(mutex);
  const auto found = own_groups().find(key);
  if (found == own_groups().end()) return {};
  return {found->second.group.lock(), found->second.requests};
}

void keep(const Key& key, const OwnGroup& own) {
  const std::lock_guard lock(mutex);
  auto& groups = own_groups();
  for (auto at = groups.begin(); at != groups.end();) {
    at = at->second.group.expired() ? groups.erase(at) : std::next(at);
  }
  groups.insert_or_assign(
      key, Entry{c10::weak_intrusive_ptr<c10d::ProcessGroup>(own.group), own.number});
}

std::vector<int64_t> largest(const std::vector<int64_t>& numbers, const ProcessGroup& group) {
  auto all = at::tensor(numbers, at::dtype(at::kLong).device(carrier_device(*group)));
  all_reduce(all, c10d::ReduceOp::MAX, group);
  all = all.cpu();
  return {all.const_data_ptr<int64_t>(), all.const_data_ptr<int64_t>() + all.numel()};
}

ProcessGroup made_group(const ProcessGroup& group) {
  return new_group(numbers_up_to(group->getSize()), group);
}

}  // namespace

OwnGroup own_group_of(const ProcessGroup& group, OwnOrder order, const ProcessGroup& replicas) {
  if (!group) return {};
  const Key key(group.get(), order);
  auto own = known_group(key);
  if (group->getSize() == 1) {
    own.group = group;
  } else {
    // Another rank may have dropped its last model.
    const auto most = largest({own.group ? 0 : 1, own.number}, group);
    own.number = most[1];
    if (most[0] == 1) own = {made_group(group), 0};
  }
  if (replicas && replicas->getSize() > 1) own.number = largest({own.number}, replicas)[0];
  ++own.number;
  keep(key, own);
  return own;
}

}  // namespace ddp
