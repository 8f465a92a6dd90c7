#include "fused.h"

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/TensorOptions.h>
#include <ddp/collectives.h>
#include <ddp/internal/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include "normalize.h"

namespace ddp {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// An empty batch counts as this: the operator that merges the ranks' statistics divides by counts,
/// and a number of values does not change when it is added. Python removes such ranks instead,
/// which makes the host wait.
constexpr double kNoValues = 1e-30;

std::optional<at::Tensor> if_any(const at::Tensor& t) {
  return t.defined() ? std::optional(t) : std::nullopt;
}

/// Means, inverse deviations and the count of this rank's batch: 2 C + 1.
at::Tensor message_of(const at::Tensor& input, double eps) {
  const auto channels = input.size(1);
  const auto options = input.options().dtype(compute_dtype_of(input));
  if (input.numel() == 0) {
    auto own = at::ones({2 * channels + 1}, options);
    own.narrow(0, 2 * channels, 1).fill_(kNoValues);
    return own;
  }
  const auto [mean, inverse] = at::batch_norm_stats(input, eps);
  const auto count = at::full({1}, static_cast<double>(input.numel() / channels), options);
  return at::cat({mean, inverse, count});
}

struct Statistics {
  at::Tensor mean, inverse;  // [C]
  at::Tensor counts;         // [W], int
};

/// Running statistics in the dtype of the message, which the operator wants of them. It takes the
/// input's dtype for the message's where there are none.
at::Tensor running_for(const at::Tensor& running, const at::Tensor& input, const at::Tensor& own) {
  if (running.defined()) return running.to(own.scalar_type());
  if (input.scalar_type() == own.scalar_type()) return running;
  return at::zeros({input.size(1)}, own.options());
}

/// Writes what the operator has made of them back to where they are kept.
void keep(at::Tensor running, const at::Tensor& updated) {
  if (!running.defined()) return;
  if (!running.is_same(updated)) {
    running.copy_(updated);
  } else if (!running.is_inference()) {
    running.unsafeGetTensorImpl()->bump_version();  // the operator's schema names no output
  }
}

Statistics merge(
    const at::Tensor& input, const NormTensors& layer, double momentum, double eps,
    const ProcessGroup& group) {
  const c10::NoGradGuard no_grad;
  const auto own = message_of(input, eps);
  auto all = at::empty({get_world_size(group), own.numel()}, own.options());
  all_gather_into_tensor(all, own, group);
  const auto channels = input.size(1);
  const auto parts = all.split_with_sizes({channels, channels, 1}, 1);
  const auto counts = parts[2].view(-1);
  check_has_values(input, counts);

  const auto running_mean = running_for(layer.running_mean, input, own);
  const auto running_var = running_for(layer.running_var, input, own);
  const auto [mean, inverse] = at::batch_norm_gather_stats_with_counts(
      input, parts[0], parts[1], running_mean, running_var, momentum, eps, counts);
  keep(layer.running_mean, running_mean);
  keep(layer.running_var, running_var);
  return {mean, inverse, counts.to(at::kInt)};
}

class NormalizeFused : public torch::autograd::Function<NormalizeFused> {
 public:
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& input, const std::optional<at::Tensor>& weight,
      const std::optional<at::Tensor>& bias, const Statistics& of, double eps,
      const ProcessGroup& group) {
    context->save_for_backward(
        {input, weight.value_or(at::Tensor()), of.mean, of.inverse, of.counts});
    context->saved_data["group"] = c10::IValue::make_capsule(group);
    if (input.numel() == 0) return at::empty_like(input);
    return at::batch_norm_elemt(input, weight, bias, of.mean, of.inverse, eps);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    check_has_no_graph();
    const auto saved = context->get_saved_variables();
    const auto& input = saved[0];
    const auto weight = if_any(saved[1]);
    const auto &mean = saved[2], &inverse = saved[3], &counts = saved[4];
    const auto group = c10::static_intrusive_pointer_cast<c10d::ProcessGroup>(
        context->saved_data["group"].toCapsule());
    // Parameters that the layer lacks are no inputs of the node.
    const auto needs = [&](size_t i) { return (i == 0 || weight) && context->needs_input_grad(i); };
    const auto dy = gradients[0].contiguous(input.suggest_memory_format());

    at::Tensor sum_dy, sum_dy_xmu, of_weight, of_bias;
    if (input.numel() > 0) {
      std::tie(sum_dy, sum_dy_xmu, of_weight, of_bias) = at::batch_norm_backward_reduce(
          dy, input, mean, inverse, weight, needs(0), needs(1), needs(2));
    } else {  // it takes part in the sums
      sum_dy = sum_dy_xmu = of_weight = of_bias = at::zeros_like(mean);
    }
    variable_list result(6);
    if (needs(0)) {
      auto sums = at::cat({sum_dy, sum_dy_xmu});
      sum_weighted(sums, group);
      const auto of_all = sums.chunk(2);
      result[0] = input.numel() == 0
                      ? at::zeros_like(input)
                      : at::batch_norm_backward_elemt(
                            dy, input, mean, inverse, weight, of_all[0], of_all[1], counts);
    }
    if (needs(1)) result[1] = of_weight.to(weight->scalar_type());
    if (needs(2)) result[2] = of_bias.to(weight->scalar_type());
    return result;
  }
};

}  // namespace

bool has_fused_operators(const at::Tensor& input) {
  static const auto operators = [] {
    std::vector<c10::OperatorHandle> all;
    for (const auto* name :
         {"batch_norm_stats", "batch_norm_gather_stats_with_counts", "batch_norm_elemt",
          "batch_norm_backward_reduce", "batch_norm_backward_elemt"}) {
      all.push_back(c10::Dispatcher::singleton().findSchemaOrThrow(
          (std::string("aten::") + name).c_str(), ""));
    }
    return all;
  }();
  const auto key = c10::computeDispatchKey(input.scalar_type(), input.layout(), input.device());
  return all_of(operators, [&](const auto& op) { return op.hasKernelForDispatchKey(key); });
}

at::Tensor normalize_fused(
    const at::Tensor& given, const NormTensors& layer, double momentum, double eps,
    const ProcessGroup& group) {
  const auto input = given.contiguous(given.suggest_memory_format());
  const auto statistics = merge(input, layer, momentum, eps, group);
  return NormalizeFused::apply(
      input, if_any(layer.weight), if_any(layer.bias), statistics, eps, group);
}

}  // namespace ddp
