#include "low_rank.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/where.h>

namespace ddp {
namespace {

at::Tensor lengths_of(const at::Tensor& columns) {
  return at::linalg_vector_norm(columns, 2, at::IntArrayRef{1}, /*keepdim=*/true);
}

// Columns depend on each other where a gradient has a low rank, as that of one row or of an unused
// layer. Of such a column only rounding is left, which points in any direction, and also in that of
// the columns before it: these would count a part of the gradient twice. A column of zeros would
// stay one, because a warm start takes it up.
at::Tensor independent_of(const at::Tensor& first, at::Tensor column) {
  const auto in_float = column.options().dtype(at::kFloat);  // a half ends at 65504
  const auto numbers = at::arange(1, column.size(1) + 1, in_float).mul_(first.size(2) + 1).cos_();
  const auto spare = numbers.to(column.scalar_type()).view({1, -1, 1});
  constexpr int kTimes = 3;  // each leaves what rounding the one before made
  for (int i = 0; i < kTimes; ++i) {
    column = at::where(lengths_of(column) == 0, spare, column);
    column = column / lengths_of(column);
    column = column - first.bmm(first.transpose(1, 2).bmm(column));
  }
  return column;
}

void gram_schmidt(const at::Tensor& matrices, double epsilon) {
  constexpr double kLeftOfWeak = 0.01;
  const auto columns = matrices.size(2);
  const auto before = lengths_of(matrices);
  for (int64_t i = 0; i < columns; ++i) {
    const auto column = matrices.narrow(2, i, 1);
    if (epsilon == 0) {
      const auto is_weak = lengths_of(column) <= before.narrow(2, i, 1) * kLeftOfWeak;
      // On another device the host does not wait for the answer.
      if (!column.is_cpu() || is_weak.any().item<bool>()) {
        const auto other = independent_of(matrices.narrow(2, 0, i), column);
        column.copy_(at::where(is_weak, other, column));
      }
    }
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
