#pragma once

#include <cstddef>
#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace ddp {

enum class OnFree {
  kReuse,   ///< It waits for the next block of its size, which is spared the page faults of new
            ///< ones.
  kReturn,  ///< The kernel gets it.
};

/// Host memory for whole parameters and for gradients' shards. It comes from the kernel: malloc
/// would put other memory between, and grow.
///
/// Before the kernel is asked for a block, it gets back all that wait: so blocks of several sizes
/// do not add up. Threads: any.
c10::DataPtr allocate_block(size_t bytes, OnFree on_free);

/// 1-D memory of a tensor: a block, or on a device its allocator's. Not initialized.
at::Tensor empty_block(int64_t numel, const at::TensorOptions& options, OnFree on_free);

/// Returns the blocks that wait to the kernel.
void trim_blocks();

}  // namespace ddp
