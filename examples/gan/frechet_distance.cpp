#include "frechet_distance.h"

#include <tuple>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

namespace gan {
namespace {

at::Tensor square_root(const at::Tensor& covariance) {
  const auto [values, vectors] = at::linalg_eigh(covariance);
  return vectors.mul(values.clamp_min(0).sqrt()).mm(vectors.t());
}

}  // namespace

double frechet_distance(const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK_VALUE(
      a.size(0) >= 2 && b.size(0) >= 2, "frechet_distance: expected 2 or more images, got ",
      a.size(0), " and ", b.size(0), ".");
  const auto x = a.flatten(1).to(at::kDouble);
  const auto y = b.flatten(1).to(at::kDouble);
  const auto x_covariance = at::cov(x.t());
  const auto y_covariance = at::cov(y.t());
  // Computes the trace of the root of x_covariance * y_covariance from a symmetric matrix with the
  // same eigenvalues.
  const auto root = square_root(x_covariance);
  const auto product = at::linalg_eigvalsh(root.mm(y_covariance).mm(root));
  const auto squared = (x.mean(0) - y.mean(0)).square().sum() + x_covariance.trace() +
                       y_covariance.trace() - 2 * product.clamp_min(0).sqrt().sum();
  return squared.item<double>();
}

}  // namespace gan
