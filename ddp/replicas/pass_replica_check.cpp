#include "replicas/pass_replica_check.h"

#include <ddp/internal/check.h>
#include <ddp/internal/current_stream.h>
#include <ddp/internal/hash.h>

#include "replicas/model_description.h"
#include "replicas/replica_check.h"

namespace ddp {

void PassReplicaCheck::restart() {
  first_ = First::Pending;
  passes_ = 0;  // a rank that joins begins with it
  comparison_.drop();
}

void PassReplicaCheck::compare_first(
    c10::function_ref<std::string()> describe_hook,
    c10::function_ref<std::vector<at::Tensor>()> find, const ProcessGroup& group,
    GroupMonitor& monitor) {
  if (first_ != First::Pending) return;
  first_ = First::Equal;
  if (group->getSize() == 1 || !(init_sync_ || every_.value_or(0) > 0)) return;
  Description mine{{"communication", "hook", describe_hook()}};
  if (every_ != 0) {
    hash_ = hash_of(find());
    mine.push_back({"hash", "parameters", std::to_string(hash_)});
  }
  auto by_rank = gather_if_hashes_differ("communication hooks", mine, nullptr, group, monitor);
  if (by_rank.empty()) return;
  for (auto& description : by_rank) description.resize(1);
  check_are_same(by_rank);
  // Only a hash is known here. The pass continues, and its end finds the parameter's name.
  first_ = First::Different;
}

void PassReplicaCheck::start(
    c10::Device device, c10::function_ref<std::vector<at::Tensor>()> find,
    c10::function_ref<uint64_t()> hash_more, c10d::ProcessGroup& group) {
  if (every_.value_or(0) == 0 || group.getSize() == 1) return;
  // In any pass: the graph replays one without a check, and no later pass would have one.
  DDP_CHECK(
      !is_capturing(device),
      "DistributedDataParallel: expected a graph to be captured in a step without a replica check, "
      "got one of a model with check_replicas_every or vote. Leave these out, and call "
      "check_replicas().");
  if (++passes_ % *every_ != 0) return;
  const auto tensors = find();
  hash_ = mixed(hash_of(tensors), hash_more());
  comparison_.start(hash_, tensors.front().device(), group);
}

PassReplicaCheck::Found PassReplicaCheck::finish(GroupMonitor& monitor) {
  const bool differ = comparison_.finish("parameters", monitor) == false;
  if (first_ == First::Different) {
    first_ = First::Pending;
    return Found::InFirst;
  }
  return differ ? Found::Later : Found::Nothing;
}

}  // namespace ddp
