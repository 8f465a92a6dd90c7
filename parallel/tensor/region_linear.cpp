#include "tensor/region_linear.h"

#include <optional>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <ddp/functional.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/sample_weight.h>
#include <torch/csrc/autograd/custom_function.h>

#include "functional/region.h"

namespace ddp {
namespace {

using functional::Exchange;
using functional::PendingExchange;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool is_in_autocast(const at::Tensor& t) {
  const auto device = t.device().type();
  return at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device);
}

constexpr const char* kOfInput = "exchange of the input";
constexpr const char* kHasBias = "has_bias";

/// [T, ..., n] as [T * ..., n].
at::Tensor rows_of(const at::Tensor& t) { return t.reshape({-1, t.size(-1)}); }

/// linear() of the result of an exchange of `input`.
class RegionLinear : public torch::autograd::Function<RegionLinear> {
 public:
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
      const std::optional<at::Tensor>& bias, const c10::intrusive_ptr<Exchange>& exchange) {
    // Each is for the other's gradient.
    context->save_for_backward(
        {weight.requires_grad() ? input : at::Tensor(),
         input.requires_grad() ? weight : at::Tensor()});
    context->saved_data[kOfInput] = c10::IValue::make_capsule(exchange);
    context->saved_data[kHasBias] = bias.has_value();
    return at::linear(exchange->run(input), weight, bias);
  }

  // Uses differentiable operations, so that it has a backward pass, too. In the dtype of the
  // gradient: under autocast forward computed in that one.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto capsule = context->saved_data[kOfInput].toCapsule();
    const auto exchange = c10::static_intrusive_pointer_cast<Exchange>(capsule);
    const bool of_input = context->needs_input_grad(0), of_weight = context->needs_input_grad(1);
    const double sample_share = of_input ? sample_weight() : 1;
    const auto rows = rows_of(gradients[0]);

    PendingExchange input, reduced;
    if (of_weight) input = start_in_backward(saved[0], exchange);
    if (of_input) {
      auto sizes = gradients[0].sizes().vec();
      sizes.back() = saved[1].size(1);
      auto own = rows.matmul(saved[1].to(rows.scalar_type())).view(sizes);
      if (sample_share != 1) own = own * sample_share;
      reduced = start_in_backward(own, exchange->backward());
    }
    variable_list result(4);
    if (of_weight) {
      result[1] = rows.t().matmul(rows_of(input.wait().to(rows.scalar_type())));
    }
    if (context->saved_data[kHasBias].toBool() && context->needs_input_grad(2)) {
      result[2] = rows.sum(0);
    }
    if (of_input) {
      result[0] = reduced.wait();
      if (sample_share != 1) result[0] = result[0] / sample_share;
    }
    return result;
  }
};

at::Tensor region_linear(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, Exchange::Kind kind,
    const ProcessGroup& group) {
  return RegionLinear::apply(
      input, weight, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt,
      c10::make_intrusive<Exchange>(kind, group, /*dim=*/0));
}

}  // namespace

at::Tensor copied_linear(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
    const ProcessGroup& group) {
  const bool has_two_gradients =
      c10::GradMode::is_enabled() && input.requires_grad() && weight.requires_grad();
  if (group->getSize() == 1 || !has_two_gradients || input.dim() < 2 || is_in_autocast(input)) {
    return at::linear(functional::copy_to_region(input, group), weight, bias);
  }
  record_differentiable_call(group, input, /*requires_gradient=*/true);
  return region_linear(input, weight, bias, Exchange::Kind::kCopy, group);
}

at::Tensor gathered_linear(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
    const ProcessGroup& group) {
  if (group->getSize() == 1) return at::linear(input, weight, bias);
  return region_linear(input, weight, bias, Exchange::Kind::kJoinToBeSummed, group);
}

}  // namespace ddp
