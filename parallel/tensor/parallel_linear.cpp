#include <ddp/parallel_linear.h>

#include <memory>
#include <optional>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/functional.h>
#include <ddp/internal/carried_hook.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/linear.h>

#include "functional/region.h"
#include "tensor/cut.h"

namespace ddp {
namespace {

constexpr const char* kColumn = "ColumnParallelLinear";
constexpr const char* kRow = "RowParallelLinear";

/// The values that torch::nn::Linear draws, the same on all ranks.
template <typename Options>
torch::nn::Linear draw_linear(const char* layer, const Options& options) {
  torch::nn::LinearOptions of_whole(options.in_features(), options.out_features());
  torch::nn::Linear whole(of_whole.bias(options.bias()));
  check_drawn_alike(layer, whole->weight, options.process_group().get());
  return whole;
}

void check_input(
    const char* layer, const at::Tensor& input, int64_t features, const c10d::ProcessGroup& group) {
  DDP_CHECK_VALUE(
      input.defined() && input.dim() > 0 && input.size(-1) == features, layer,
      ": expected an input [..., ", features, "], got ", sizes_text(input), " ",
      on_rank_text(group), ". Pass what the layer before returns, of as many features.");
}

/// [..., W * P * n], where rank r's part is P blocks of n, as [..., P * W * n] in the whole's
/// order.
at::Tensor gather_features(const at::Tensor& part, int64_t partitions, const ProcessGroup& group) {
  const auto blocks = part.unflatten(-1, {partitions, -1});
  return functional::gather_from_region(blocks, group, -1).flatten(-2, -1);
}

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

/// linear(gathered, weight, bias), where `gathered` is `input` of all ranks along dimension 0.
/// Keeps `input` for the backward pass and gathers it again there.
at::Tensor gathered_linear(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
    const ProcessGroup& group) {
  if (group->getSize() == 1) return at::linear(input, weight, bias);
  return GatheredLinear::apply(
      input, weight, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt,
      c10::make_intrusive<Exchange>(Exchange::Kind::kJoinToBeSummed, group, /*dim=*/0));
}

/// Runs on the sum of a leaf's gradients, before that is added to `.grad`.
class SumOverGroup : public CarriedHook {
 public:
  explicit SumOverGroup(ProcessGroup group) : group_(std::move(group)) {}

  variable_list operator()(const variable_list& gradients) override {
    auto summed = gradients;
    if (summed[0].defined()) {
      summed[0] = functional::apply_exchange(
          summed[0], c10::make_intrusive<Exchange>(Exchange::Kind::kSum, group_));
    }
    return summed;
  }

  std::unique_ptr<FunctionPreHook> copy() const override {
    return std::make_unique<SumOverGroup>(group_);
  }

  const ProcessGroup& group() const { return group_; }

 private:
  const ProcessGroup group_;
};

/// Sums the gradient of `parameter` over the group in each backward pass. Does nothing if it does
/// so already.
void sum_gradient_over(const at::Tensor& parameter, const ProcessGroup& group) {
  if (group->getSize() == 1) return;
  const bool is_marked = any_of(torch::autograd::impl::hooks(parameter), [&](const auto& hook) {
    const auto* sum = dynamic_cast<const SumOverGroup*>(hook.get());
    return sum != nullptr && sum->group() == group;
  });
  if (is_marked) return;
  torch::autograd::impl::add_hook(parameter, std::make_unique<SumOverGroup>(group));
}

}  // namespace

ColumnParallelLinearImpl::ColumnParallelLinearImpl(const ColumnParallelLinearOptions& given)
    : options(given) {
  reset();
}

ColumnParallelLinearImpl::ColumnParallelLinearImpl(
    const ColumnParallelLinearOptions& given, const at::Tensor& whole_weight,
    const at::Tensor& whole_bias)
    : options(given) {
  check_options();
  cut(whole_weight, whole_bias);
  reset();
}

void ColumnParallelLinearImpl::check_options() {
  options.process_group(options.process_group().get());
  const auto& group = *options.process_group().get();
  check_divides(kColumn, "in_features", options.in_features(), 1, "1", group);
  check_divides(kColumn, "partitions", options.partitions(), 1, "1", group);
  check_divides(
      kColumn, "out_features", options.out_features(), options.partitions() * group.getSize(),
      "partitions * ranks", group);
}

void ColumnParallelLinearImpl::cut(const at::Tensor& whole_weight, const at::Tensor& whole_bias) {
  const c10::NoGradGuard no_grad;
  const auto& group = *options.process_group().get();
  check_whole(
      kColumn, "weight", whole_weight, {options.out_features(), options.in_features()}, group);
  check_whole_bias(kColumn, options.bias(), whole_bias, options.out_features(), group);
  weight = own_rows(whole_weight, options.partitions(), group);
  if (options.bias()) bias = own_rows(whole_bias, options.partitions(), group);
}

// A clone has the values of what it was made of, and only gets memory of its own.
void ColumnParallelLinearImpl::reset() {
  if (!weight.defined()) {
    check_options();
    const auto whole = draw_linear(kColumn, options);
    cut(whole->weight, whole->bias);
  }
  weight = register_parameter("weight", weight.detach().clone());
  const auto own_bias = bias.defined() ? bias.detach().clone() : bias;
  bias = register_parameter("bias", own_bias, /*requires_grad=*/options.bias());
}

std::vector<ParameterLayout> ColumnParallelLinearImpl::layouts() {
  const auto group = options.process_group().get();
  const auto out = options.out_features(), partitions = options.partitions();
  std::vector<ParameterLayout> layouts{
      layout_of_rows("weight", weight, {out, options.in_features()}, partitions, group)};
  if (bias.defined()) layouts.push_back(layout_of_rows("bias", bias, {out}, partitions, group));
  return layouts;
}

void ColumnParallelLinearImpl::pretty_print(std::ostream& stream) const {
  stream << "ddp::ColumnParallelLinear(in_features=" << options.in_features()
         << ", out_features=" << options.out_features()
         << ", ranks=" << options.process_group().get()->getSize() << ")";
}

at::Tensor ColumnParallelLinearImpl::forward(const at::Tensor& input) {
  const auto group = options.process_group().get();
  check_input(kColumn, input, options.in_features(), *group);
  const auto output = options.sequence_parallel()
                          ? gathered_linear(input, weight, bias, group)
                          : at::linear(functional::copy_to_region(input, group), weight, bias);
  if (!options.gather_output()) return output;
  return gather_features(output, options.partitions(), group);
}

RowParallelLinearImpl::RowParallelLinearImpl(const RowParallelLinearOptions& given)
    : options(given) {
  reset();
}

RowParallelLinearImpl::RowParallelLinearImpl(
    const RowParallelLinearOptions& given, const at::Tensor& whole_weight,
    const at::Tensor& whole_bias)
    : options(given) {
  check_options();
  cut(whole_weight, whole_bias);
  reset();
}

void RowParallelLinearImpl::check_options() {
  options.process_group(options.process_group().get());
  const auto& group = *options.process_group().get();
  check_divides(kRow, "out_features", options.out_features(), 1, "1", group);
  check_divides(kRow, "in_features", options.in_features(), group.getSize(), "ranks", group);
}

void RowParallelLinearImpl::cut(const at::Tensor& whole_weight, const at::Tensor& whole_bias) {
  const c10::NoGradGuard no_grad;
  const auto& group = *options.process_group().get();
  check_whole(kRow, "weight", whole_weight, {options.out_features(), options.in_features()}, group);
  check_whole_bias(kRow, options.bias(), whole_bias, options.out_features(), group);
  weight = own_columns(whole_weight, group);
  if (options.bias()) bias = whole_bias;
}

void RowParallelLinearImpl::reset() {
  if (!weight.defined()) {
    check_options();
    const auto whole = draw_linear(kRow, options);
    cut(whole->weight, whole->bias);
  }
  weight = register_parameter("weight", weight.detach().clone());
  const auto own_bias = bias.defined() ? bias.detach().clone() : bias;
  bias = register_parameter("bias", own_bias, /*requires_grad=*/options.bias());
  // Each rank adds it to its part of the sequence.
  if (bias.defined() && options.sequence_parallel()) {
    sum_gradient_over(bias, options.process_group().get());
  }
}

std::vector<ParameterLayout> RowParallelLinearImpl::layouts() {
  const auto group = options.process_group().get();
  std::vector<ParameterLayout> layouts{
      layout_of_columns("weight", weight, {options.out_features(), options.in_features()}, group)};
  if (bias.defined()) layouts.push_back(layout_of_replica("bias", bias, group));
  return layouts;
}

void RowParallelLinearImpl::pretty_print(std::ostream& stream) const {
  stream << "ddp::RowParallelLinear(in_features=" << options.in_features()
         << ", out_features=" << options.out_features()
         << ", ranks=" << options.process_group().get()->getSize() << ")";
}

at::Tensor RowParallelLinearImpl::forward(const at::Tensor& input) {
  const auto group = options.process_group().get();
  const int64_t features = options.input_is_parallel() ? weight.size(1) : options.in_features();
  check_input(kRow, input, features, *group);
  const auto own =
      options.input_is_parallel() ? input : functional::scatter_to_region(input, group);
  const auto part = at::linear(own, weight);
  const auto output = options.sequence_parallel() ? functional::reduce_scatter(part, 0, group)
                                                  : functional::reduce_from_region(part, group);
  return bias.defined() ? output + bias.to(output.scalar_type()) : output;
}

void mark_replicated_partial(torch::nn::Module& module, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  for (const auto& parameter : module.parameters()) sum_gradient_over(parameter, group);
}

}  // namespace ddp
