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

namespace {

void expect_ranks(bool holds, const std::string& rule, const std::string& got) {
  if (holds) return;
  throw UsageError(rule + ", got " + got + " (transformer --help lists the options)");
}

void check_product(const Options& options, int64_t ranks) {
  using std::to_string;
  const int64_t a_replica = options.pp * options.cp * options.tp;
  expect_ranks(
      ranks % a_replica == 0,
      "--pp, --cp, --tp: expected a product that divides the number of ranks, " + to_string(ranks),
      to_string(options.pp) + " * " + to_string(options.cp) + " * " + to_string(options.tp));
  expect_ranks(
      options.dp == 0 || options.dp * a_replica == ranks,
      "--dp: expected " + to_string(ranks / a_replica) + ", so that --pp * --dp * --cp * --tp is " +
          "the number of ranks, " + to_string(ranks),
      to_string(options.dp));
}

Groups without_cuts() {
  const int64_t ranks = ddp::get_world_size();
  auto groups = with_whole_models(ranks, ddp::get_rank());
  groups.tp = ddp::init_device_mesh({ranks, 1}, {"dp", "tp"}).group("tp");
  groups.data = groups.totals = ddp::default_group();
  return groups;
}

Groups in_regions(const Regions& regions) {
  const int64_t ranks = ddp::get_world_size(), rank = ddp::get_rank();
  const bool is_elastic = !regions.coordinator.empty();
  const auto count = is_elastic ? 1 : regions.count == 0 ? ranks : regions.count;
  expect_ranks(
      ranks % count == 0,
      "--regions: expected a number that divides that of the ranks, " + std::to_string(ranks),
      std::to_string(count));
  const auto region_size = ranks / count;
  auto groups = without_cuts();
  groups.data = ddp::split_group(static_cast<int>(rank / region_size));
  if (!is_elastic) groups.leaders = ddp::split_group(rank % region_size == 0 ? 0 : -1);
  return groups;
}

}  // namespace

Groups with_whole_models(int64_t replicas, int64_t replica) {
  Groups groups;
  groups.replicas = replicas;
  groups.replica = replica;
  return groups;
}

Groups make_groups(const Options& options) {
  const int64_t ranks = ddp::get_world_size(), a_replica = options.pp * options.cp * options.tp;
  if (options.regions.are_used()) return in_regions(options.regions);
  check_product(options, ranks);
  if (a_replica == 1) return without_cuts();
  // Ranks that differ by one are neighbors on the last axis, which sends most. The first one sends
  // least: its neighbors may be on other hosts.
  const auto mesh = ddp::init_device_mesh(
      {options.pp, ranks / a_replica, options.cp, options.tp}, {"pp", "dp", "cp", "tp"});
  Groups groups;
  groups.tp = mesh.group("tp");
  groups.cp = mesh.group("cp");
  // The ranks that share windows have parts of their gradients.
  groups.data = groups.totals = mesh.flatten({"dp", "cp"});
  groups.replicas = mesh.size("dp");
  groups.replica = mesh.rank("dp");
  if (options.pp > 1) {
    groups.pp = mesh.group("pp");
    groups.ends = ddp::new_group({0, static_cast<int>(options.pp) - 1}, groups.pp);
    groups.totals = mesh.flatten({"pp", "dp", "cp"});
    groups.stage = mesh.rank("pp");
  }
  return groups;
}

}  // namespace transformer
