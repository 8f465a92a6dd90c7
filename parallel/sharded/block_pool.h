#pragma once

#include <cstddef>

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace ddp {

/// Host memory for whole parameters and for gradients' shards. It comes from the kernel: malloc
/// would put other memory between, and grow.
///
/// Freed blocks are reused without the page faults of new ones, also by the next pass. Before the
/// kernel is asked for another, it gets back those that were freed before this pass: so models that
/// take turns do not add up.
/// Threads: any.
c10::DataPtr allocate_block(size_t bytes);

/// 1-D memory of a tensor: a block, or on a device its allocator's. Not initialized.
at::Tensor empty_block(int64_t numel, const at::TensorOptions& options);

/// Begins a pass.
void begin_pass_over_blocks();

/// Returns the freed blocks to the kernel.
void trim_blocks();

}  // namespace ddp
