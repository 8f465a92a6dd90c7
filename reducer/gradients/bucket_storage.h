#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

/// The memory into which one bucket's dense gradients are packed, and one view into it per
/// parameter, with gradient_strides().
///
/// Threads: as Bucket.
class BucketStorage {
 public:
  /// Makes 1-D memory of `numel` elements, which the backend can reduce in place.
  using Allocate = std::function<at::Tensor(int64_t numel, const at::TensorOptions&)>;

  /// No memory: a sparse gradient is sent without a copy into storage.
  BucketStorage() = default;
  /// \param parameters  slot k is for the gradient of parameter k; may be empty.
  /// \param tail  extra elements after the gradients, sent along with them.
  /// \param options  dtype and device of all parameters.
  /// \param slot_bytes  slots begin at multiples of it, with zeros between them; 1: without gaps.
  BucketStorage(
      const std::vector<at::Tensor>& parameters, int64_t tail, const at::TensorOptions& options,
      const Allocate& allocate, int64_t slot_bytes);

  /// Returns the elements of the gradients, and of the gaps between them.
  static int64_t numel_of(const std::vector<at::Tensor>& parameters, int64_t slot_bytes);

  /// Gradients and tail, 1-D.
  const at::Tensor& all() const { return all_; }
  /// The same memory as real numbers, as it is sent.
  const at::Tensor& wire() const { return wire_; }
  /// The gradients without the tail.
  const at::Tensor& gradients() const { return gradients_; }
  const at::Tensor& tail() const { return tail_; }
  /// By slot.
  const std::vector<at::Tensor>& views() const { return views_; }

  /// The view of `slot`'s gradient in `flat`, which is 1-D and laid out like gradients().
  at::Tensor view_into(const at::Tensor& flat, size_t slot) const;

  /// Whether `grad` lies exactly where `slot`'s view does.
  ///
  /// Compares the cached address first: it decides most cases without a cache miss on the view.
  bool has_in_place(size_t slot, const at::Tensor& grad) const {
    if (grad.layout() != at::kStrided || grad.const_data_ptr() != addresses_[slot]) return false;
    return grad.strides() == views_[slot].strides() && grad.sizes() == views_[slot].sizes();
  }

 private:
  at::Tensor all_;
  at::Tensor wire_;
  at::Tensor gradients_;
  at::Tensor tail_;
  std::vector<at::Tensor> views_;
  std::vector<const void*> addresses_;  // of the views' first elements
};

}  // namespace ddp
