#include "gradients/sparse_gradient.h"

#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>

#include "gradients/gradient_kind.h"

namespace ddp {

// All ranks must have the same number of sparse dimensions: one, as the gradient of an embedding.
at::Tensor sparse_without_rows(const at::Tensor& parameter) {
  auto values = parameter.sizes().vec();
  values.front() = 0;
  const auto options =
      at::TensorOptions().dtype(parameter.scalar_type()).device(parameter.device());
  return at::sparse_coo_tensor(
      at::empty({1, 0}, options.dtype(at::kLong)), at::empty(values, options), parameter.sizes());
}

PackedSparse pack_sparse(const at::Tensor& parameter, double scale) {
  const at::Tensor& grad = parameter.mutable_grad();
  const bool is_sparse = grad.defined() && grad.layout() == at::kSparse;
  // A rank with weight 0 (no samples) sends no rows, so that inf * 0 cannot become NaN.
  if (is_sparse && scale != 0) return {scale == 1.0 ? grad.clone() : grad * scale, ""};
  if (is_sparse || !grad.defined()) return {sparse_without_rows(parameter), ""};
  auto none = sparse_without_rows(parameter);
  auto difference = kind_difference(grad, none);
  return {std::move(none), std::move(difference)};
}

void unpack_sparse(const at::Tensor& parameter, const at::Tensor& reduced) {
  at::Tensor& grad = parameter.mutable_grad();
  if (grad.defined() && grad.layout() == at::kSparse) {
    grad.copy_(reduced);
  } else {
    grad = reduced;
  }
}

}  // namespace ddp
