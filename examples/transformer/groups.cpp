#include "groups.h"

#include <string>

#include <ATen/ATen.h>
#include <ddp/context_parallel.h>
#include <ddp/device_mesh.h>

namespace transformer {

at::Tensor Groups::own_positions(const at::Tensor& windows) const {
  return cp_size() == 1 ? windows : ddp::functional::context_shard(windows, 1, cp);
}

at::Tensor Groups::places(int64_t length) const {
  return cp_size() == 1 ? at::arange(length) : ddp::functional::context_positions(length, cp);
}

Groups make_groups(const Options& options) {
  const int64_t ranks = ddp::get_world_size(), a_replica = options.cp * options.tp;
  Groups groups;
  if (a_replica == 1) {
    groups.tp = ddp::split_group(ddp::get_rank());
    groups.data = ddp::default_group();
    groups.replicas = ranks;
    groups.replica = ddp::get_rank();
    return groups;
  }
  if (ranks % a_replica != 0) {
    throw UsageError(
        "--tp, --cp: expected a product that divides the number of ranks, " +
        std::to_string(ranks) + ", got " + std::to_string(options.tp) + " * " +
        std::to_string(options.cp) + " (transformer --help lists the options)");
  }
  // Ranks that differ by one are neighbors on the last axis, which sends most.
  const auto mesh =
      ddp::init_device_mesh({ranks / a_replica, options.cp, options.tp}, {"dp", "cp", "tp"});
  groups.tp = mesh.group("tp");
  groups.cp = mesh.group("cp");
  // The ranks that share windows have parts of their gradients.
  groups.data = mesh.flatten({"dp", "cp"});
  groups.replicas = mesh.size("dp");
  groups.replica = mesh.rank("dp");
  return groups;
}

}  // namespace transformer
