#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "segment.h"

namespace ddp::backends::shm {

/// Allocates tensors in this rank's segment, which the other ranks of the host map too. A
/// collective reduces such a tensor in place.
///
/// Thread safety: all members.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  /// \param bytes  of the segment, from its beginning; a multiple of the page size.
  Arena(std::shared_ptr<Segment> segment, size_t bytes);

  /// Whether a tensor's memory goes back to the kernel when the tensor is destroyed, or the arena
  /// keeps it for the next tensor.
  enum class OnRelease { kDiscard, kKeep };

  /// Allocates a 1-D tensor of `numel` elements, uninitialized. The tensor keeps the arena alive,
  /// and releases its memory when it is destroyed.
  ///
  /// \throws c10::OutOfMemoryError  if no block of that size is free.
  at::Tensor allocate(int64_t numel, at::ScalarType type, OnRelease on_release);

  /// Reserves a block of that many bytes, uninitialized; null if none is free.
  std::byte* try_reserve(size_t bytes);
  /// Returns a block of try_reserve(), with the same number of bytes.
  void release(std::byte* block, size_t bytes, OnRelease on_release);

  /// Returns the memory that no tensor uses to the kernel.
  void discard_free();

  /// Owns `memory`, of this arena, until freeze(): another rank may still access it, so no tensor
  /// gets it again.
  void keep(std::shared_ptr<const void> memory);

  /// Stops reusing the memory of destroyed tensors, and drops what keep() was given.
  void freeze();

  /// The offset of an address in the segment, in bytes.
  size_t offset_at(const std::byte* place) const {
    return static_cast<size_t>(place - segment_->data());
  }
  /// The offset of `t` in the segment, in bytes; nothing if `t` lies elsewhere.
  std::optional<size_t> offset_of(const at::Tensor& t) const;

 private:
  std::shared_ptr<Segment> segment_;
  std::mutex mutex_;
  std::map<size_t, size_t> free_;  // offset to bytes; adjacent blocks are merged
  std::vector<std::shared_ptr<const void>> kept_;
  bool frozen_ = false;
};

}  // namespace ddp::backends::shm
