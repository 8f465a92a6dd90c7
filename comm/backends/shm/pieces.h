#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp::backends::shm {

/// Tensors that lie anywhere in this process, as if they were one flat one.
class Pieces {
 public:
  /// \param tensors  contiguous, of one dtype, at least one.
  explicit Pieces(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
    for (const auto& tensor : tensors_) {
      const auto count = static_cast<size_t>(tensor.numel());
      places_.push_back({static_cast<std::byte*>(tensor.mutable_data_ptr()), numel_, count});
      numel_ += count;
    }
  }

  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  size_t numel() const { return numel_; }
  size_t element_size() const { return tensors_.front().element_size(); }

  /// Calls body(memory, first, count) for the pieces of elements [begin, end), where `memory` holds
  /// elements first, first + 1, ...
  template <typename Body>
  void each(size_t begin, size_t end, const Body& body) const {
    for (const auto& place : places_) {
      const size_t first = std::max(begin, place.first);
      const size_t last = std::min(end, place.first + place.count);
      if (first >= last) continue;
      body(place.memory + (first - place.first) * element_size(), first, last - first);
    }
  }

 private:
  struct Place {
    std::byte* memory;
    size_t first;  // of its elements among all
    size_t count;
  };
  std::vector<at::Tensor> tensors_;
  std::vector<Place> places_;
  size_t numel_ = 0;
};

}  // namespace ddp::backends::shm
