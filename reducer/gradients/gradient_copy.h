// Whether gradients are of one kind, and copies of them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

class FiniteCheck;

/// Whether both have one layout, dtype, device and shape.
bool is_like(const at::Tensor& a, const at::Tensor& b);

/// How `got` differs in what is_like() compares: "Double instead of Float"; "" where it does not.
std::string kind_difference(const at::Tensor& got, const at::Tensor& expected);

/// dst = src * scale, elementwise, in one pass; a plain copy when `scale` is 1.
///
/// The same bits as `at::mul_out(dst, src, scale)`, but without the dispatcher's microseconds where
/// both are dense CPU floats of one layout, as most gradients are. The caller must hold a
/// NoGradGuard, so that autograd records nothing.
///
/// \param dst  same sizes, dtype and device as `src`; may not overlap it.
/// \param check  looks at the numbers of `dst` while they are in the caches; null: none does.
void copy_scaled(
    const at::Tensor& dst, const at::Tensor& src, double scale, FiniteCheck* check = nullptr);

/// t *= scale, in place; nothing when `scale` is 1. `check` as in copy_scaled().
void scale_in_place(const at::Tensor& t, double scale, FiniteCheck* check = nullptr);

/// memcpy with stores that bypass the caches, where the processor has them. For large blocks: most
/// of such a block would be evicted before it is read, and an ordinary store would first read the
/// cache line that it overwrites.
void streaming_copy(void* to, const void* from, size_t bytes);

/// Many copies, times one scale: on the CPU each at once; on a device together in finish(), with
/// one kernel for many tensors instead of one for each. A scale is a second kernel there, so copies
/// of large tensors that have one are not made together.
class ScaledCopies {
 public:
  enum class When { AtOnce, Together };
  /// \param check  as in copy_scaled(); null where the copies are made together.
  ScaledCopies(double scale, When when, FiniteCheck* check = nullptr)
      : scale_(scale), when_(when), check_(check) {}

  void copy(const at::Tensor& dst, const at::Tensor& src);
  void scale(const at::Tensor& t);
  void finish();

 private:
  double scale_;
  When when_;
  FiniteCheck* check_;
  std::vector<at::Tensor> destinations_;
  std::vector<at::Tensor> sources_;
  std::vector<at::Tensor> scaled_;
};

}  // namespace ddp
