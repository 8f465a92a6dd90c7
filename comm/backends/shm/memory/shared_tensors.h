#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "../sync/control_block.h"
#include "arena.h"

namespace ddp::backends::shm {

/// Tensors of this process that one collective reduces as if they were one, each where it lies if
/// that is the arena. Of others, the arena gets a copy of what other ranks sum; what this rank sums
/// stays where the caller has it.
///
/// What the other ranks see begins, where there are several tensors, with a table of their places.
class SharedTensors {
 public:
  /// \param tensors  plain, of one dtype; at least one.
  /// \throws c10::OutOfMemoryError  when the arena is full.
  SharedTensors(std::vector<at::Tensor> tensors, Arena& arena, int rank, int ranks);

  /// Of an all-reduce; `reduction` is the caller's to set.
  Descriptor descriptor() const;

  /// Elements [begin, end) of one tensor, wherever each rank has it.
  struct Part {
    std::vector<std::byte*> places;  // by rank, of the tensor's first element
    size_t begin;
    size_t end;
  };
  /// Calls `body` for each part of this rank's share.
  ///
  /// \param buffers  by rank, what its descriptor points to.
  void each_of_own_share(
      const std::vector<std::byte*>& buffers, c10::function_ref<void(const Part&)> body) const;

  /// When all ranks have written their shares: brings them to the caller's tensors.
  void copy_out() const;

 private:
  struct Extent {
    at::Tensor tensor;  // the caller's, or a contiguous stand-in
    size_t first = 0;   // index of its first element, over all tensors
    size_t numel = 0;
    std::byte* own = nullptr;    // where this rank has it
    std::byte* shown = nullptr;  // where others find it; `own`, or the copy
  };
  std::byte* make_room(Arena& arena);
  void each_of_other_shares(c10::function_ref<void(std::byte*, std::byte*, size_t)> body) const;

  const std::vector<at::Tensor> callers_;
  const int rank_;
  std::vector<Extent> extents_;
  at::Tensor memory_;  // the table and the copies; undefined where neither is needed
  size_t numel_ = 0;
  size_t begin_ = 0;  // of this rank's share
  size_t end_ = 0;
  uint64_t offset_ = 0;
};

}  // namespace ddp::backends::shm
