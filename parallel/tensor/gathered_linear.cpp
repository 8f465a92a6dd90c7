#include "tensor/gathered_linear.h"

#include <optional>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "functional/region.h"

namespace ddp {
namespace {

using functional::Exchange;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kGather = "gather";
constexpr const char* kHasBias = "has_bias";

class GatheredLinear : public torch::autograd::Function<GatheredLinear> {
 public:
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
      const std::optional<at::Tensor>& bias, const c10::intrusive_ptr<Exchange>& gather) {
    context->save_for_backward({input, weight});
    context->saved_data[kGather] = c10::IValue::make_capsule(gather);
    context->saved_data[kHasBias] = bias.has_value();
    return at::linear(gather->run(input), weight, bias);
  }

  // Uses differentiable operations, so that it has a backward pass, too. In the dtype of the
  // gradient: under autocast forward computed in that one.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto& gradient = gradients[0];
    const auto saved = context->get_saved_variables();
    const auto capsule = context->saved_data[kGather].toCapsule();
    const auto gather = c10::static_intrusive_pointer_cast<Exchange>(capsule);
    const auto dtype = gradient.scalar_type();
    const auto rows = gradient.flatten(0, -2);
    variable_list result(4);
    if (context->needs_input_grad(0)) {
      result[0] =
          functional::apply_exchange(at::matmul(gradient, saved[1].to(dtype)), gather->backward());
    }
    if (context->needs_input_grad(1)) {
      const auto gathered = functional::apply_exchange(saved[0], gather).to(dtype);
      result[1] = rows.t().matmul(gathered.flatten(0, -2));
    }
    if (context->saved_data[kHasBias].toBool() && context->needs_input_grad(2)) {
      result[2] = rows.sum(0);
    }
    return result;
  }
};

}  // namespace

at::Tensor gathered_linear(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
    const ProcessGroup& group) {
  if (group->getSize() == 1) return at::linear(input, weight, bias);
  return GatheredLinear::apply(
      input, weight, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt,
      c10::make_intrusive<Exchange>(Exchange::Kind::kJoinToBeSummed, group, /*dim=*/0));
}

}  // namespace ddp
