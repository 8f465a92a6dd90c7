#pragma once

#include <ATen/core/Tensor.h>

namespace ddp {

/// dst = src * scale, elementwise, in one pass; a plain copy when `scale` is 1.
///
/// The same bits as `at::mul_out(dst, src, scale)`, but without the dispatcher's microseconds for
/// what most gradients are: dense CPU floats laid out like their destination. Nothing is recorded
/// by autograd; the caller holds a NoGradGuard.
///
/// \param dst  same sizes, dtype and device as `src`; may not overlap it.
void copy_scaled(const at::Tensor& dst, const at::Tensor& src, double scale);

/// t *= scale, in place; nothing when `scale` is 1.
void scale_in_place(const at::Tensor& t, double scale);

}  // namespace ddp
