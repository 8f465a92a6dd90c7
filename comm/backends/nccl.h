// NCCL where it is built in (nccl.cpp), and what stands for it elsewhere (no_nccl.cpp).
#pragma once

#include <optional>

#include "../gpu_assignment.h"
#include "setup.h"

namespace ddp::backends {

/// The GPU that this process would use NCCL with, or why it cannot, such as that NCCL is not built
/// in. Loads the CUDA driver.
GpuAssignment find_gpu(const std::optional<Setting>& local_rank);

/// Connects nothing yet: NCCL does so in the first collective, on the device of its tensors.
BackendPtr make_nccl(const Setup& setup);

/// Makes this GPU the current one of the calling thread.
void use_cuda_device(int index);

}  // namespace ddp::backends
