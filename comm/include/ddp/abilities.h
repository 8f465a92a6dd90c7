#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp {

/// Whether the group's backend for `device` knows ReduceOp::AVG for floating-point tensors: one
/// pass over the memory less than dividing before a sum. Like that, it does not overflow.
bool averages_in_collective(c10d::ProcessGroup& group, c10::Device device);

/// Whether waiting for a collective of the group's backend for `device` holds up the current
/// stream alone, and not the host.
bool waits_on_stream(c10d::ProcessGroup& group, c10::Device device);

}  // namespace ddp
