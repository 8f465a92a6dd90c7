#include "replicas.h"

#include <ddp/internal/check.h>

#include <ddp/process_group.h>

namespace ddp {
namespace {

void check_default_group(const char* sampler, const char* option) {
  DDP_CHECK(
      is_initialized(), sampler, ": expected ", option,
      " in the options or a default process group, got neither. Call ddp::init_process_group() "
      "first, or set num_replicas() and rank().");
}

}  // namespace

ShardSpec shard_of_rank(
    const char* sampler, std::optional<int64_t> num_replicas, std::optional<int64_t> rank) {
  if (!num_replicas.has_value()) check_default_group(sampler, "num_replicas");
  if (!rank.has_value()) check_default_group(sampler, "rank");

  ShardSpec spec;
  spec.num_replicas = num_replicas ? *num_replicas : get_world_size();
  spec.rank = rank ? *rank : get_rank();
  DDP_CHECK_VALUE(
      spec.num_replicas >= 1 && spec.num_replicas <= INT32_MAX, sampler,
      ": expected num_replicas >= 1 and below 2^31, got ", spec.num_replicas,
      ". Pass the number of ranks that share the dataset.");
  DDP_CHECK_VALUE(
      spec.rank >= 0 && spec.rank < spec.num_replicas, sampler, ": Invalid rank ", spec.rank,
      ", rank should be in the interval [0, ", spec.num_replicas - 1,
      "]. Pass this process's rank among the num_replicas, or leave both unset to use the default "
      "group.");
  return spec;
}

}  // namespace ddp
