#include <ddp/parallel_linear.h>

#include <memory>
#include <optional>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/functional.h>
#include <ddp/internal/call_log.h>
#include <ddp/internal/carried_hook.h>
#include <ddp/internal/check.h>
#include <ddp/internal/cut_registry.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/linear.h>

#include "functional/region.h"
#include "tensor/cut.h"
#include "tensor/region_linear.h"

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
using torch::autograd::variable_list;

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
  note_cut(layouts(), CutBy::Layer);
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
  log_layer_forward(weight);
  check_input(kColumn, input, options.in_features(), *group);
  const auto output = options.sequence_parallel() ? gathered_linear(input, weight, bias, group)
                                                  : copied_linear(input, weight, bias, group);
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
  note_cut(layouts(), CutBy::Layer);
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
  log_layer_forward(weight);
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
