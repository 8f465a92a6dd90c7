#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp {

/// Memory in which a backend reduces tensors in place, and in which autograd's tensors can be
/// allocated, so that they need no copy in or out.
///
/// Thread safety: all members.
class GradientMemory {
 public:
  virtual ~GradientMemory() = default;

  /// Whether the backend reduces tensors of this dtype element by element: the result is then the
  /// same to the bit however tensors are cut into collectives.
  virtual bool reduces(at::ScalarType type) const = 0;

  /// From this size on, in bytes, reducing a tensor in place beats copying it into a larger one.
  virtual size_t least_bytes() const = 0;

  /// Whether the dense tensor `t` lies in this memory.
  virtual bool contains(const at::Tensor& t) const = 0;

  /// Allocates a 1-D tensor, uninitialized, with a storage of its own: in this memory, or on the
  /// heap if this memory is full.
  virtual at::Tensor allocate(int64_t numel, const at::TensorOptions& options) = 0;

  /// Allocates the calling thread's CPU tensors in this memory if their size in bytes is one of
  /// `sizes`, until the returned object is destroyed, on any thread.
  ///
  /// \param sizes  in ascending order.
  virtual std::shared_ptr<void> serve(std::vector<size_t> sizes) = 0;
};

/// The memory of the group's backend for `device`; null if it has none.
std::shared_ptr<GradientMemory> gradient_memory_of(c10d::ProcessGroup& group, c10::Device device);

}  // namespace ddp
