#include "low_rank.h"

#include <limits>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Dispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/where.h>

namespace ddp {
namespace {

double rounding_of(at::ScalarType dtype) {
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "orthogonalize", [] {
    return static_cast<double>(std::numeric_limits<scalar_t>::epsilon());
  });
}

at::Tensor lengths_of(const at::Tensor& columns) {
  return at::linalg_vector_norm(columns, 2, at::IntArrayRef{1}, /*keepdim=*/true);
}

/// Some column that does not depend on the first `i`, which are orthonormal.
at::Tensor another_column(const at::Tensor& matrices, int64_t i) {
  const auto first = matrices.narrow(2, 0, i);
  const auto numbers = at::arange(1, matrices.size(1) + 1, matrices.options());
  const auto column =
      numbers.mul_(i + 1).cos_().view({1, -1, 1}).expand_as(matrices.narrow(2, i, 1));
  return column - first.bmm(first.transpose(1, 2).bmm(column));
}

// Columns depend on each other where a gradient has a low rank, as that of one row or of an unused
// layer. Of such a column only rounding is left, in any direction, and beside the others it would
// count a part of the gradient twice. A column of zeros would stay one: a warm start takes it up.
void gram_schmidt(const at::Tensor& matrices, double epsilon) {
  const auto columns = matrices.size(2);
  const auto of_rounding = lengths_of(matrices) * (8 * rounding_of(matrices.scalar_type()));
  for (int64_t i = 0; i < columns; ++i) {
    const auto column = matrices.narrow(2, i, 1);
    const auto is_dependent = lengths_of(column) <= of_rounding.narrow(2, i, 1);
    column.copy_(at::where(is_dependent, another_column(matrices, i), column));
    column.div_(lengths_of(column).add_(epsilon));
    if (i + 1 == columns) break;
    const auto rest = matrices.narrow(2, i + 1, columns - i - 1);
    rest.sub_((column * rest).sum(at::IntArrayRef{1}, /*keepdim=*/true) * column);
  }
}

}  // namespace

void orthogonalize(const at::Tensor& matrices, double epsilon) {
  constexpr int64_t kFewColumns = 2;
  const auto dtype = matrices.scalar_type();
  if (matrices.size(2) <= kFewColumns || dtype == at::kHalf || dtype == at::kBFloat16) {
    gram_schmidt(matrices, epsilon);
  } else {
    matrices.copy_(std::get<0>(at::linalg_qr(matrices)));
  }
}

at::Tensor as_matrix(const at::Tensor& gradient) {
  if (gradient.dim() == 0 || gradient.numel() == 0) return {};
  const auto rows = gradient.size(0);
  const auto columns = gradient.numel() / rows;
  if (gradient.is_contiguous()) return gradient.view({rows, columns});
  // In channels_last, the columns come in another order, and so do those of their approximation.
  if (gradient.is_non_overlapping_and_dense() && gradient.stride(0) == columns) {
    return gradient.as_strided({rows, columns}, {columns, 1});
  }
  return {};
}

uint32_t SeedSequence::next() {
  constexpr uint32_t kLargest = 999'999'999;
  constexpr uint32_t kMask = (uint32_t{1} << 30) - 1;  // the bits that kLargest needs
  ++drawn_;
  for (;;) {
    const auto value = static_cast<uint32_t>(engine_()) & kMask;
    if (value <= kLargest) return value;
  }
}

void SeedSequence::restore(int64_t drawn) {
  *this = SeedSequence(seed_);
  while (drawn_ < drawn) next();
}

void fill_normal(const std::vector<at::Tensor>& tensors, uint32_t seed) {
  const auto generator = at::detail::createCPUGenerator(seed);
  for (const auto& tensor : tensors) {
    tensor.copy_(at::randn(tensor.sizes(), generator, tensor.options().device(at::kCPU)));
  }
}

}  // namespace ddp
