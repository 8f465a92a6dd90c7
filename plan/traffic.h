#pragma once

#include <cstdint>

#include "plan/cluster.h"
#include "plan/layout.h"

namespace ddp::plan {

/// Where the ranks of an axis lie: neighbors share tp, then dp, then pp.
enum class Axis { Tp, Dp, Pp };

/// Seconds of an all-reduce over an axis, while all groups of the axis do the same. Within a host
/// it is a ring. Over several hosts each host's sums go through the network, for all groups that
/// the host has ranks of.
double all_reduce_time(const Cluster&, const Layout&, Axis axis, double bytes);
/// Seconds of an all-gather to so many bytes, or of a reduce-scatter of them: half an all-reduce.
double gather_time(const Cluster&, const Layout&, Axis axis, double bytes);
/// Seconds of a message from a stage to the next one, while all ranks of the stage send one.
double message_time(const Cluster&, const Layout&, double bytes);

/// Whether an axis has ranks on several hosts.
bool crosses_hosts(const Cluster&, const Layout&, Axis axis);

}  // namespace ddp::plan
