#include "precision/casts.h"

#include <memory>
#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

namespace ddp {
namespace {

/// Gives a gradient the dtype that the tensor had before the cast.
class CastBackward : public torch::autograd::Node {
 public:
  explicit CastBackward(at::ScalarType dtype) : dtype_(dtype) {}

  std::string name() const override { return "ddp::CastBackward"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    return {gradients[0].to(dtype_)};
  }

 private:
  const at::ScalarType dtype_;
};

}  // namespace

std::vector<at::Tensor> cast_all(const std::vector<at::Tensor>& tensors, at::ScalarType dtype) {
  if (tensors.empty()) return {};
  std::vector<at::Tensor> casts;
  {
    const at::NoGradGuard no_grad;
    for (const auto& t : tensors) casts.push_back(at::empty_like(t, t.options().dtype(dtype)));
    at::_foreach_copy_(casts, tensors);
  }
  for (size_t i = 0; i < tensors.size() && c10::GradMode::is_enabled(); ++i) {
    if (!tensors[i].requires_grad()) continue;
    const auto node = std::make_shared<CastBackward>(tensors[i].scalar_type());
    node->add_next_edge(torch::autograd::impl::gradient_edge(tensors[i]));
    torch::autograd::set_history(casts[i], node);
  }
  return casts;
}

}  // namespace ddp
