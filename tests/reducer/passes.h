// What the tests of the Reducer train: single parameters, one pass at a time.
#pragma once

#include <ddp/reducer.h>
#include <torch/torch.h>

namespace ddp::testing {

/// Ones that want a gradient.
inline at::Tensor parameter(at::IntArrayRef sizes = {3}, at::ScalarType dtype = at::kFloat) {
  return torch::ones(sizes, dtype).set_requires_grad(true);
}

/// Runs one backward pass of `loss()` that `reducer` averages.
template <typename Loss>
void reduced_backward(Reducer& reducer, const Loss& loss) {
  reducer.prepare_for_forward();
  const at::Tensor value = loss();
  reducer.prepare_for_backward({{value}, true});
  value.backward();
}

}  // namespace ddp::testing
