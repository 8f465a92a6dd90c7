// Whether gradients are finite, found while they are in the processor's caches.
#pragma once

#include <atomic>
#include <cstddef>

#include <ATen/core/Tensor.h>

namespace ddp {

/// Remembers whether one of the numbers that it was given is infinite or NaN. It gives no false
/// alarm: it looks at each number's exponent, not at a sum.
///
/// Threads: look() any.
class FiniteCheck {
 public:
  /// Whether look() knows the dtype's bits: that of floating point and complex numbers of 16 to 64
  /// bits.
  static bool knows(at::ScalarType dtype);
  /// \param numbers  `bytes` of whole numbers of a `dtype` that it knows.
  void look(at::ScalarType dtype, const void* numbers, size_t bytes);
  /// Looks at all numbers of a tensor on the CPU; of a sparse one at its values.
  void look(const at::Tensor& tensor);

  /// Whether one was not finite since the last call.
  bool take_failed() { return failed_.exchange(false); }

 private:
  std::atomic<bool> failed_{false};
};

}  // namespace ddp
