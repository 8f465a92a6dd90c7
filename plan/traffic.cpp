#include "plan/traffic.h"

#include <algorithm>

namespace ddp::plan {
namespace {

int64_t size_of(const Layout& layout, Axis axis) {
  if (axis == Axis::Tp) return layout.tp;
  return axis == Axis::Dp ? layout.dp : layout.pp;
}

/// The distance between neighbors of an axis, in ranks.
int64_t stride_of(const Layout& layout, Axis axis) {
  if (axis == Axis::Tp) return 1;
  return axis == Axis::Dp ? layout.tp : layout.tp * layout.dp;
}

/// How many ranks of a group lie on one host, at most.
int64_t local_size(const Cluster& cluster, const Layout& layout, Axis axis) {
  const auto within = std::max<int64_t>(1, cluster.ranks_a_host() / stride_of(layout, axis));
  return std::min(size_of(layout, axis), within);
}

/// Hockney's model of one direction of a ring: a reduce-scatter, or an all-gather.
double ring_time(const Link& link, int64_t ranks, double bytes) {
  if (ranks == 1) return 0;
  const auto steps = static_cast<double>(ranks - 1);
  return steps * (link.latency + bytes / static_cast<double>(ranks) / link.rate);
}

/// One direction over both levels: hosts exchange a part of `1 / local` for each local rank. All
/// parts, of all groups of a host, go through the same network.
double time_of_direction(const Cluster& cluster, const Layout& layout, Axis axis, double bytes) {
  const auto local = local_size(cluster, layout, axis);
  const auto hosts = size_of(layout, axis) / local;
  const auto groups = static_cast<double>(cluster.ranks_a_host()) / static_cast<double>(local);
  Link shared = cluster.network;
  shared.rate /= std::max(1.0, groups);
  return ring_time(cluster.host, local, bytes) + ring_time(shared, hosts, bytes);
}

}  // namespace

double all_reduce_time(const Cluster& cluster, const Layout& layout, Axis axis, double bytes) {
  return 2 * time_of_direction(cluster, layout, axis, bytes);
}

double gather_time(const Cluster& cluster, const Layout& layout, Axis axis, double bytes) {
  return time_of_direction(cluster, layout, axis, bytes);
}

double message_time(const Cluster& cluster, const Layout& layout, double bytes) {
  const auto stride = stride_of(layout, Axis::Pp);
  if (!crosses_hosts(cluster, layout, Axis::Pp)) {
    return cluster.host.latency + bytes / cluster.host.rate;
  }
  // The ranks of a host whose next stage is elsewhere.
  const auto senders = static_cast<double>(std::min(stride, cluster.ranks_a_host()));
  return cluster.network.latency + bytes * senders / cluster.network.rate;
}

bool crosses_hosts(const Cluster& cluster, const Layout& layout, Axis axis) {
  return local_size(cluster, layout, axis) < size_of(layout, axis);
}

}  // namespace ddp::plan
