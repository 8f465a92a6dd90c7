// Helpers for tests of the Reducer: single parameters, and one pass at a time.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include <ddp/internal/autograd_node.h>
#include <ddp/internal/reducer.h>
#include <torch/torch.h>

namespace ddp::testing {

/// Ones that require a gradient.
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

/// Calls `act` whenever `tensor` has its gradient: before the hook of a reducer that is made later,
/// and after that of an existing one, which may have launched the bucket already.
/// \return  the node that keeps the hook alive.
inline NodePtr after_gradient(const at::Tensor& tensor, std::function<void()> act) {
  struct Hook : torch::autograd::FunctionPostHook {
    explicit Hook(std::function<void()> f) : act(std::move(f)) {}
    torch::autograd::variable_list operator()(
        const torch::autograd::variable_list& outputs,
        const torch::autograd::variable_list& /*inputs*/) override {
      act();
      return outputs;
    }
    std::function<void()> act;
  };
  auto accumulator = torch::autograd::impl::grad_accumulator(tensor);
  accumulator->add_post_hook(std::make_unique<Hook>(std::move(act)));
  return accumulator;
}

}  // namespace ddp::testing
