#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ddp/process_group.h>

namespace ddp {

/// 1-D memory: the backend's own where it can reduce that in place, without copies in and out.
at::Tensor reducible_memory(
    c10d::ProcessGroup& group, int64_t numel, const at::TensorOptions& options);

}  // namespace ddp
