// NCCL if it is built in (nccl.cpp), else a replacement that reports that it is not (no_nccl.cpp).
#pragma once

#include <optional>

#include "backends/gpu_assignment.h"
#include "backends/setup.h"

namespace ddp::backends {

/// Returns the GPU that this process would use with NCCL, or why it cannot use NCCL, such as that
/// NCCL is not built in. Loads the CUDA driver.
GpuAssignment find_gpu(
    const std::optional<Setting>& local_rank, const std::optional<c10::Device>& device_id);

/// Connects to setup.device_id, if it is set, on a thread of its own, which is abandoned after the
/// deadline: NCCL's connecting has none. Else NCCL connects in the first collective, on the device
/// of its tensors.
///
/// \throws c10::DistBackendError  if it is not connected by the deadline.
BackendPtr make_nccl(const Setup& setup);

/// Makes this GPU the current one of the calling thread.
void use_cuda_device(int index);

}  // namespace ddp::backends
