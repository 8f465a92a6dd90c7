#include "finite.h"

#include <limits>

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones.h>

namespace ddp {

at::Tensor all_finite(std::initializer_list<at::Tensor> tensors) {
  constexpr auto kInfinity = std::numeric_limits<double>::infinity();
  at::Tensor all;
  for (const auto& tensor : tensors) {
    if (!tensor.defined() || tensor.numel() == 0) continue;
    // NaN is not less.
    const auto is_finite = at::linalg_vector_norm(tensor, kInfinity).lt(kInfinity);
    all = all.defined() ? all.logical_and(is_finite) : is_finite;
  }
  return all.defined() ? all : at::ones({}, at::kBool);
}

}  // namespace ddp
