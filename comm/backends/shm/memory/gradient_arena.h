#pragma once

#include <memory>
#include <vector>

#include <ddp/internal/gradient_memory.h>

#include "arena.h"

namespace ddp::backends::shm {

/// An Arena from which LibTorch's CPU allocator allocates tensors of chosen sizes, for one thread
/// and a limited time. Such tensors lie in memory that all ranks of the host map.
///
/// When the first arena is made, an allocator of this library is installed in front of the current
/// one. It passes on all requests that no arena serves. If a program sets its own allocator later,
/// that one replaces it: gradients then lie elsewhere, and are copied.
///
/// A tensor keeps its arena alive, also after the group is destroyed. In a process that this one
/// forked, arenas serve no requests.
class GradientArena final : public GradientMemory {
 public:
  /// Whether a backend reduces a dtype in place.
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
