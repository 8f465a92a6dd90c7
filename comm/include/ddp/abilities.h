#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp {

/// Whether the group's backend for `device` knows ReduceOp::AVG for floating-point tensors: one
/// pass over the memory less than dividing before a sum. Like that, it does not overflow.
bool averages_in_collective(c10d::ProcessGroup& group, c10::Device device);

/// Whether the group's backend for `device` allocates memory (`allocateTensor`) to reduce in
/// without copies in and out, and buckets are to lie there. Ranks have to agree on it; the wrapper
/// compares it when it is made (with init_sync).
///
/// NCCL's, which it registers, only where DDP_DISABLE_COMM_MEM is set, and not to 1, as in
/// PyTorch: NCCL wants the buffers of all ranks at the same offsets into what they registered, and
/// a pool that reuses a block once the device is through with it does not promise that. Needs a
/// communicator, that is a collective before. Source: NCCL's guide, "User Buffer Registration".
bool reduces_in_own_memory(c10d::ProcessGroup& group, c10::Device device);

/// Whether waiting for a collective of the group's backend for `device` holds up the current
/// stream alone, and not the host.
bool waits_on_stream(c10d::ProcessGroup& group, c10::Device device);

}  // namespace ddp
