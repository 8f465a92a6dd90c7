// How much memory a rank's CPU tensors take, by what they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/macros/Macros.h>
#include <ddp/export.h>

namespace ddp {

enum class MemoryKind : uint8_t {
  Parameters,   // and buffers of modules
  Gradients,    // that parameters hold
  Optimizer,    // made after a backward pass, and alive when the next step begins
  Activations,  // made in forward and backward
  Buckets,      // of gradients, by the reducer and sharded models
  Gathered,     // whole parameters of sharded models
  Other,
  Uncounted,  // made by a backend for itself
};

/// While it exists, tensors that this thread makes are of a kind. The innermost counts.
/// Cost: two moves of a number.
class DDP_API MemoryScope {
 public:
  explicit MemoryScope(MemoryKind kind);
  ~MemoryScope();
  C10_DISABLE_COPY_AND_ASSIGN(MemoryScope);

 private:
  const int outer_;
};

/// Has LibTorch's allocator for the CPU count the bytes of each kind from now on; once a process.
void count_tensor_memory();

/// The memory, counted until it is freed, if memory is counted: of a scope's kind, or of `kind`.
DDP_API c10::DataPtr counted_memory(c10::DataPtr memory, size_t bytes, MemoryKind kind);

/// A step begins with the model's forward pass. Finds the kinds of the tensors that exist. Peaks
/// begin with the second step.
///
/// \param tensors  the model's parameters and buffers; those of other devices end the counting.
void count_step_of_memory(const std::vector<at::Tensor>& tensors);

/// "memory" lines for each kind, and a "peak" line; "" where nothing was counted.
std::string tensor_memory_lines();

}  // namespace ddp
