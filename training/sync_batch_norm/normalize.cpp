#include "normalize.h"

#include <numeric>
#include <optional>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/collectives.h>
#include <ddp/internal/check.h>
#include <ddp/internal/sample_weight.h>
#include <torch/csrc/autograd/custom_function.h>

namespace ddp {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

int64_t channels_of(const at::Tensor& input) { return input.size(1); }

std::vector<int64_t> other_dimensions(const at::Tensor& input) {
  std::vector<int64_t> dimensions(static_cast<size_t>(input.dim()) - 1);
  std::iota(dimensions.begin() + 1, dimensions.end(), 2);
  return dimensions;
}

/// Reshapes [C] for broadcasting with an input.
at::Tensor per_channel(const at::Tensor& values, const at::Tensor& input) {
  std::vector<int64_t> shape(static_cast<size_t>(input.dim()), 1);
  shape[1] = values.numel();
  return values.to(compute_dtype_of(input)).view(shape);
}

/// Mean and variance of each channel.
std::pair<at::Tensor, at::Tensor> local_moments(const at::Tensor& input) {
  const auto [var, mean] =
      at::var_mean(input.to(compute_dtype_of(input)), other_dimensions(input), /*unbiased=*/false);
  return {mean, var};
}

/// Returns mean, variance and values a channel of this rank's batch: 2 C + 1 doubles.
at::Tensor local_statistics(const at::Tensor& input) {
  const auto channels = channels_of(input);
  auto own = at::zeros({2 * channels + 1}, input.options().dtype(at::kDouble));
  if (input.numel() == 0) return own;
  const auto [mean, var] = local_moments(input);
  own.narrow(0, 0, channels).copy_(mean);
  own.narrow(0, channels, channels).copy_(var);
  own.narrow(0, 2 * channels, 1).fill_(static_cast<double>(input.numel() / channels));
  return own;
}

/// Sums over the batch, for each channel: of the output's gradient, and of it times the normalized
/// input.
struct GradientSums {
  at::Tensor dy, dy_normalized;  // [C], in the compute dtype of the input
};

GradientSums local_sums(
    const at::Tensor& dy, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& var,
    double eps) {
  if (input.numel() == 0) return {at::zeros_like(mean), at::zeros_like(mean)};
  // The gradients of BatchNorm's weight and bias in evaluation are these sums.
  auto [unused, dy_normalized, sum] = at::native_batch_norm_backward(
      dy, input, /*weight=*/std::nullopt, mean, var, /*save_mean=*/std::nullopt,
      /*save_invstd=*/std::nullopt, /*train=*/false, eps, {false, true, true});
  return {sum, dy_normalized};
}

class Normalize : public torch::autograd::Function<Normalize> {
 public:
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& input, const std::optional<at::Tensor>& weight,
      const std::optional<at::Tensor>& bias, const at::Tensor& mean, const at::Tensor& var,
      const at::Tensor& count, double eps, const c10::IValue& group) {
    context->save_for_backward({input, weight.value_or(at::Tensor()), mean, var, count});
    context->saved_data["eps"] = eps;
    context->saved_data["group"] = group;
    if (input.numel() == 0) return at::empty_like(input);
    const auto type = compute_dtype_of(input);
    const auto in = [type](const std::optional<at::Tensor>& t) {
      return t ? std::optional<at::Tensor>(t->to(type)) : std::nullopt;
    };
    auto output = std::get<0>(at::native_batch_norm(
        input.to(type), in(weight), in(bias), mean.to(type), var.to(type), /*training=*/false,
        /*momentum=*/0, eps));
    return output.to(input.scalar_type());
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    check_has_no_graph();
    const auto saved = context->get_saved_variables();
    const at::Tensor& input = saved[0];
    const at::Tensor& weight = saved[1];
    const at::Tensor& mean = saved[2];
    const at::Tensor& var = saved[3];
    const at::Tensor& count = saved[4];
    const double eps = context->saved_data["eps"].toDouble();
    const auto group = c10::static_intrusive_pointer_cast<c10d::ProcessGroup>(
        context->saved_data["group"].toCapsule());
    const auto type = compute_dtype_of(input);
    const auto x = input.to(type);
    const auto dy = gradients[0].to(type);
    const auto sums = local_sums(dy, x, mean.to(type), var.to(type), eps);

    at::Tensor dx;
    if (context->needs_input_grad(0)) {
      auto all = at::cat({sums.dy, sums.dy_normalized}).to(at::kDouble);
      sum_weighted(all, group);
      const auto means = all.div(count).chunk(2);
      const auto inverse = var.add(eps).rsqrt();
      dx = x.sub(per_channel(mean, x));
      dx.mul_(per_channel(inverse * means[1], x)).neg_();
      dx.add_(dy).sub_(per_channel(means[0], x));
      dx.mul_(per_channel(weight.defined() ? inverse * weight : inverse, x));
      dx = dx.to(input.scalar_type());
    }
    const auto in = [&](const at::Tensor& sum, size_t index) {
      return context->needs_input_grad(index) ? sum.to(weight.scalar_type()) : at::Tensor();
    };
    return {dx, in(sums.dy_normalized, 1), in(sums.dy, 2), {}, {}, {}, {}, {}};
  }
};

}  // namespace

at::ScalarType compute_dtype_of(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void check_has_values(const at::Tensor& input, const at::Tensor& counts) {
  // A rank that has two values need not wait for the device; all ranks that do wait get the same
  // answer.
  DDP_CHECK_VALUE(
      input.numel() >= 2 * input.size(1) || counts.sum().item<double>() >= 2,
      "Expected more than 1 value per channel when training, got input size ", input.sizes(),
      " and no more on any other rank. Give a rank two samples, or switch to eval().");
}

void check_has_no_graph() {
  DDP_CHECK(
      !c10::GradMode::is_enabled(),
      "SyncBatchNorm: expected a backward without create_graph, got one with it. Second "
      "derivatives do not go through the other ranks' batches.");
}

void sum_weighted(at::Tensor& sums, const ProcessGroup& group) {
  const double weight = sample_weight();
  if (weight != 1) sums.mul_(weight);
  all_reduce(sums, c10d::ReduceOp::SUM, group);
  if (weight != 1) sums.div_(weight);
}

BatchStatistics gather_statistics(const at::Tensor& input, const ProcessGroup& group) {
  const c10::NoGradGuard no_grad;
  const auto channels = channels_of(input);
  const auto own = local_statistics(input);
  auto all = at::empty({get_world_size(group), own.numel()}, own.options());
  all_gather_into_tensor(all, own, group);
  const auto means = all.narrow(1, 0, channels);
  const auto vars = all.narrow(1, channels, channels);
  const auto counts = all.narrow(1, 2 * channels, 1);

  BatchStatistics whole;
  whole.count = counts.sum();
  check_has_values(input, whole.count);
  whole.mean = (means * counts).sum(0) / whole.count;
  whole.var = ((vars + (means - whole.mean).square()) * counts).sum(0) / whole.count;
  return whole;
}

at::Tensor normalize_with(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
    const BatchStatistics& statistics, double eps, const ProcessGroup& group) {
  const auto if_any = [](const at::Tensor& t) {
    return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt;
  };
  return Normalize::apply(
      input, if_any(weight), if_any(bias), statistics.mean, statistics.var, statistics.count, eps,
      c10::IValue::make_capsule(group));
}

}  // namespace ddp
