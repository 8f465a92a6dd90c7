#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp {

/// Memory in which a backend reduces tensors where they lie, and from which tensors that autograd
/// makes can come: those need no copy in and none out.
///
/// Thread safety: all members.
class GradientMemory {
 public:
  virtual ~GradientMemory() = default;

  /// Whether the backend reduces tensors of this kind element by element: how they are cut into
  /// collectives makes no difference to a bit.
  virtual bool reduces(at::ScalarType type) const = 0;

  /// From how many bytes on a tensor is better reduced where it lies than copied into a larger one.
  virtual size_t least_bytes() const = 0;

  /// Whether `t`, dense, lies here.
  virtual bool contains(const at::Tensor& t) const = 0;

  /// A 1-D tensor, uninitialized, with a storage of its own: here, or where there is no room, on
  /// the heap.
  virtual at::Tensor allocate(int64_t numel, const at::TensorOptions& options) = 0;

  /// From here on come the tensors that the calling thread makes whose memory has one of so many
  /// bytes, until the returned object goes, on whatever thread that happens.
  ///
  /// \param sizes  rising.
  virtual std::shared_ptr<void> serve(std::vector<size_t> sizes) = 0;
};

/// That of the group's backend for `device`; null where it has none.
std::shared_ptr<GradientMemory> gradient_memory_of(c10d::ProcessGroup& group, c10::Device device);

}  // namespace ddp
