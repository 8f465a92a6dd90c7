#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <ddp/internal/gradient_memory.h>

namespace ddp {

class FiniteCheck;

/// A large gradient that is sent without a bucket's storage: in place, if autograd made it in the
/// group's GradientMemory and nothing else uses its memory, else through a copy in GradientMemory.
///
/// Threads: as Bucket.
class DirectGradient {
 public:
  /// The tensor that pack() sends.
  enum class Send {
    Gradient,  // `.grad`, in place where that is possible
    Copy,      // a copy: `.grad` must not change if no rank used the parameter
    Zeros,
  };

  /// Whether the gradient of `parameter` is large enough, and `memory` can reduce its type.
  static bool is_eligible(const at::Tensor& parameter, const GradientMemory& memory);
  /// For tests: the least size in bytes of such a gradient; results do not depend on it. 0: the
  /// memory's own limit.
  static std::atomic<size_t> least_bytes;

  DirectGradient(at::Tensor parameter, std::shared_ptr<GradientMemory> memory);

  /// Makes `.grad`, times `scale`, ready to be sent.
  ///
  /// \param check  looks at the gradient; null: none does.
  /// \return how the kind of `.grad` differs from that of the parameter at construction; "" where
  ///         it does not. A gradient of another kind counts as zeros.
  std::string pack(double scale, Send send, FiniteCheck* check = nullptr);

  /// 1-D, in the order of the parameter's memory: the tensor that a collective reduces in place.
  const at::Tensor& wire() const { return wire_; }

  /// Makes `.grad` the reduced gradient.
  ///
  /// \param keep  leave `.grad` as it was.
  void unpack(bool keep);

 private:
  at::Tensor in_parameter_shape(const at::Tensor& wire) const;
  bool can_send_in_place(const at::Tensor& grad) const;

  at::Tensor parameter_;
  std::shared_ptr<GradientMemory> memory_;
  at::Tensor kind_;  // has the dtype, device and shape of the parameter at construction
  at::DimVector strides_;
  at::Tensor wire_;
  at::Tensor in_place_;  // the gradient, where it is sent in place
};

}  // namespace ddp
