#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp::backends::shm {

/// A view of several tensors of this process as one flat tensor.
class FlatView {
 public:
  /// \param tensors  contiguous, of one dtype, at least one.
  explicit FlatView(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
    for (const auto& tensor : tensors_) {
      const auto count = static_cast<size_t>(tensor.numel());
      extents_.push_back({static_cast<std::byte*>(tensor.mutable_data_ptr()), numel_, count});
      numel_ += count;
    }
  }

  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  size_t numel() const { return numel_; }
  size_t element_size() const { return tensors_.front().element_size(); }

  /// Calls body(memory, first, count) for each tensor's share of the elements [begin, end), where
  /// `memory` holds elements first, first + 1, ...
  template <typename Body>
  void each(size_t begin, size_t end, const Body& body) const {
    for (const auto& extent : extents_) {
      const size_t first = std::max(begin, extent.first);
      const size_t last = std::min(end, extent.first + extent.count);
      if (first >= last) continue;
      body(extent.memory + (first - extent.first) * element_size(), first, last - first);
    }
  }

 private:
  struct Extent {
    std::byte* memory;
    size_t first;  // index of its first element
    size_t count;
  };
  std::vector<at::Tensor> tensors_;
  std::vector<Extent> extents_;
  size_t numel_ = 0;
};

}  // namespace ddp::backends::shm
