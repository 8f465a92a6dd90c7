#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "../sync/control_block.h"
#include "arena.h"

namespace ddp::backends::shm {

/// Tensors of this process that one collective reduces as if they were one, each in place if it
/// lies in the arena. Of the others, the elements that other ranks sum are copied to the arena; the
/// elements that this rank sums stay in the caller's memory.
///
/// If there are several tensors, the memory that other ranks read begins with a table of them.
class SharedTensors {
 public:
  /// \param tensors  plain, of one dtype; at least one.
  /// \throws c10::OutOfMemoryError  if the arena is full.
  SharedTensors(std::vector<at::Tensor> tensors, Arena& arena, int rank, int ranks);

  /// The descriptor of an all-reduce; the caller sets its `reduction`.
  Descriptor descriptor() const;

  /// Elements [begin, end) of one tensor, in the memory of each rank.
  struct Part {
    std::vector<std::byte*> places;  // by rank, of the tensor's first element
    size_t begin;
    size_t end;
  };
  /// Calls `body` for each part of this rank's share.
  ///
  /// \param buffers  by rank, the memory at the offset of its descriptor.
  void for_each_part_of_own_share(
      const std::vector<std::byte*>& buffers, c10::function_ref<void(const Part&)> body) const;

  /// Copies the other ranks' shares to the caller's tensors, after all ranks have written theirs.
  void copy_out() const;

 private:
  struct Extent {
    at::Tensor tensor;  // the caller's, or a contiguous replacement
    size_t first = 0;   // index of its first element, over all tensors
    size_t numel = 0;
    std::byte* own = nullptr;    // its address for this rank
    std::byte* shown = nullptr;  // its address for other ranks: `own`, or the copy
  };
  std::byte* place_tensors(Arena& arena);
  void for_each_part_of_other_shares(
      c10::function_ref<void(std::byte*, std::byte*, size_t)> body) const;

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
