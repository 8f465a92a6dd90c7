#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <ddp/internal/gradient_memory.h>

namespace ddp {

/// A large gradient that travels alone: where autograd made it, if that is the group's
/// GradientMemory and nobody else sees its storage, else by way of a copy there.
///
/// Threads: as Bucket.
class DirectGradient {
 public:
  /// What pack() sends.
  enum class Send {
    Gradient,  // in place where that is possible
    Copy,      // `.grad` may turn out to be no rank's business, and stays as it is
    Zeros,
  };

  /// Whether the gradient of `parameter` is large enough, and of a type that can be reduced there.
  static bool suits(const at::Tensor& parameter, const GradientMemory& memory);
  /// For tests: the size in bytes from which on it is large enough, on which results do not depend;
  /// 0: what the memory says.
  static std::atomic<size_t> least_bytes;

  DirectGradient(at::Tensor parameter, std::shared_ptr<GradientMemory> memory);

  /// Makes `.grad`, times `scale`, ready to be sent.
  ///
  /// \return how it differs in kind from what the parameter was at first; "" where it does not. One
  ///         that does counts as zeros.
  std::string pack(double scale, Send send);

  /// 1-D, in the order of the parameter's memory: what is sent, and what comes back.
  const at::Tensor& wire() const { return wire_; }

  /// Makes `.grad` what came back.
  ///
  /// \param keep  leave `.grad` as it was.
  void unpack(bool keep);

 private:
  at::Tensor shaped(const at::Tensor& wire) const;
  bool can_send_in_place(const at::Tensor& grad) const;

  at::Tensor parameter_;
  std::shared_ptr<GradientMemory> memory_;
  at::Tensor kind_;  // of the parameter's dtype, device and shape when the ranks compared those
  at::DimVector strides_;
  at::Tensor wire_;
  at::Tensor in_place_;  // the gradient that is sent where it lies
};

}  // namespace ddp
