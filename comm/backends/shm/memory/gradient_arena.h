#pragma once

#include <memory>
#include <vector>

#include <ddp/internal/gradient_memory.h>

#include "arena.h"

namespace ddp::backends::shm {

/// An Arena behind LibTorch's CPU allocator: tensors of chosen sizes that a thread makes for a
/// while lie in memory that all ranks of the host map.
///
/// An allocator of this library is put before the one that is in place when the first arena is
/// made. It passes on whatever no arena serves. A program's own that is set later takes its place:
/// gradients lie elsewhere then, and are copied.
///
/// A tensor keeps its arena, also when the group has gone. In a process that this one forked no
/// arena serves.
class GradientArena final : public GradientMemory {
 public:
  /// What a backend reduces in place.
  using Reduces = bool (*)(at::ScalarType);

  GradientArena(std::shared_ptr<Arena> arena, size_t least_bytes, Reduces reduces);
  ~GradientArena() override;

  bool reduces(at::ScalarType type) const override { return reduces_(type); }
  size_t least_bytes() const override { return least_bytes_; }
  bool contains(const at::Tensor& t) const override { return arena_->offset_of(t).has_value(); }
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override;
  std::shared_ptr<void> serve(std::vector<size_t> sizes) override;

 private:
  const std::shared_ptr<Arena> arena_;
  const size_t least_bytes_;
  const Reduces reduces_;
};

}  // namespace ddp::backends::shm
