#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include <ATen/core/Tensor.h>

#include "segment.h"

namespace ddp::backends::shm {

/// Hands out pieces of this rank's segment, which the other ranks map too: what lies in it is
/// reduced where it is.
///
/// Thread safety: all members.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  /// \param bytes  how much of it, from its beginning; in whole pages.
  Arena(std::shared_ptr<Segment> segment, size_t bytes);

  /// Whether memory that is given back goes back to the system at once, or stays for the next.
  enum class Afterwards { kDiscard, kKeep };

  /// A 1-D tensor of `numel` elements, uninitialized. It keeps the arena alive, and gives its
  /// memory back when it goes.
  ///
  /// \throws c10::OutOfMemoryError  when no piece of that size is free.
  at::Tensor allocate(int64_t numel, at::ScalarType type, Afterwards afterwards);

  /// Takes nothing back any more: another rank may still be writing to what goes.
  void freeze();

  /// Where in the segment `t` lies, in bytes; nothing when it does not.
  std::optional<size_t> offset_of(const at::Tensor& t) const;

 private:
  size_t take(size_t bytes);
  void give_back(size_t offset, size_t bytes, Afterwards afterwards);

  std::shared_ptr<Segment> segment_;
  std::mutex mutex_;
  std::map<size_t, size_t> free_;  // offset to bytes; no two of them touch
  bool frozen_ = false;
};

}  // namespace ddp::backends::shm
