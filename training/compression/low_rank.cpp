#include "low_rank.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/randn.h>

namespace ddp {
namespace {

void gram_schmidt(const at::Tensor& matrices, double epsilon) {
  const auto columns = matrices.size(2);
  for (int64_t i = 0; i < columns; ++i) {
    const auto column = matrices.narrow(2, i, 1);
    auto length = at::linalg_vector_norm(column, 2, at::IntArrayRef{1}, /*keepdim=*/true);
    if (epsilon == 0) {
      length.masked_fill_(length == 0, 1);  // the column is 0, and stays 0
    } else {
      length.add_(epsilon);
    }
    column.div_(length);
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
