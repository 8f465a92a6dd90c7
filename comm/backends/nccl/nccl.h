// NCCL if it is built in (nccl.cpp), else a replacement that reports that it is not (no_nccl.cpp).
#pragma once

#include <optional>

#include "backends/gpu_assignment.h"
#include "backends/setup.h"

namespace ddp::backends {

/// Returns the GPU that this process would use with NCCL, or why it cannot use NCCL, such as that
/// NCCL is not built in. Loads the CUDA driver.
GpuAssignment find_gpu(const std::optional<Setting>& local_rank);

/// Connects nothing: NCCL connects in the first collective, on the device of its tensors.
BackendPtr make_nccl(const Setup& setup);

/// Makes this GPU the current one of the calling thread.
void use_cuda_device(int index);

}  // namespace ddp::backends
