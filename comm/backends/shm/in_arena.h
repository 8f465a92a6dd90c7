#pragma once

#include <memory>
#include <string>
#include <utility>

#include "arena.h"
#include "memory.h"
#include "over_gloo.h"

namespace ddp::backends::shm {

/// What all backends over shared memory have: tensors from memory that the host's ranks see.
class InArena : public OverGloo {
 public:
  InArena(
      int rank, int world_size, std::shared_ptr<Arena> arena,
      c10::intrusive_ptr<c10d::Backend> gloo)
      : OverGloo(rank, world_size, std::move(gloo)), arena_(std::move(arena)) {}

  const std::string getBackendName() const override { return "shm"; }
  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options = {}) override {
    return allocate_tensor(size, options, *arena_);
  }

 protected:
  const std::shared_ptr<Arena> arena_;
};

}  // namespace ddp::backends::shm
