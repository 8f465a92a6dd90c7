#include <ddp/gradients.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ddp/collectives.h>
#include <ddp/internal/carrier_device.h>
#include <ddp/internal/check.h>
#include <ddp/zero.h>

#include "wrapper/seen_tensors.h"

namespace ddp {
namespace {

/// The optimizer as a sharded one; null for others.
ZeroRedundancyOptimizerBase* as_sharded(torch::optim::Optimizer& optimizer) {
  return dynamic_cast<ZeroRedundancyOptimizerBase*>(&optimizer);
}

/// Leaves out parameters that were seen before: a module lists tied ones several times.
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters, SeenTensors& seen) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters) {
    if (!seen.add(parameter)) continue;
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  return gradients;
}

std::vector<at::Tensor> gradients_of(torch::optim::Optimizer& optimizer) {
  if (const auto* sharded = as_sharded(optimizer)) return sharded->gradients();
  SeenTensors seen;
  std::vector<at::Tensor> gradients;
  for (const auto& group : optimizer.param_groups()) {
    for (auto& gradient : gradients_of(group.params(), seen)) {
      gradients.push_back(std::move(gradient));
    }
  }
  return gradients;
}

void check_may_clip(const char* call, const ZeroRedundancyOptimizerBase& optimizer) {
  DDP_CHECK(
      !optimizer.options().overlap(), call,
      ": expected gradients before their step, got those of a ZeroRedundancyOptimizer with "
      "overlap, which steps in the backward pass. Set overlap(false).");
  DDP_CHECK(
      !optimizer.is_in_join(), call,
      ": expected every rank to clip, got a ZeroRedundancyOptimizer in a join(), where ranks "
      "without input step their parts as they are. Clip outside of join(), or give every rank as "
      "much input.");
}

/// Gradients that are cut over the same groups.
struct ShardedGradients {
  std::vector<at::Tensor> gradients;
  std::vector<ProcessGroup> sharded_over;
};

/// This rank's sum of |element|^norm_type, or its largest |element|: one double.
at::Tensor sum_of_powers(const std::vector<at::Tensor>& gradients, double norm_type) {
  if (norm_type == 0) return at::full({}, static_cast<double>(gradients.size()), at::kDouble);
  std::vector<at::Tensor> norms;
  for (const auto& gradient : gradients) {
    const auto values = gradient.is_sparse() ? gradient.coalesce().values() : gradient;
    if (values.numel() == 0) continue;  // a largest element does not exist
    std::optional<at::ScalarType> sum_type;
    if (at::isReducedFloatingType(values.scalar_type())) sum_type = at::kFloat;
    const auto norm = at::linalg_vector_norm(values, norm_type, {}, false, sum_type);
    norms.push_back(norm.to(norms.empty() ? norm.device() : norms.front().device(), at::kDouble));
  }
  if (norms.empty()) return at::zeros({}, at::kDouble);
  const auto all = at::stack(norms);
  return std::isinf(norm_type) ? all.max() : all.pow(norm_type).sum();
}

/// MAX of a backend may drop a NaN, so the places of NaN are reduced beside the values.
at::Tensor max_over(const ProcessGroup& group, const at::Tensor& values) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  auto message =
      at::stack({values.nan_to_num(kInfinity, kInfinity), values.isnan().to(at::kDouble)});
  all_reduce(message, c10d::ReduceOp::MAX, group);
  return message[0].masked_fill(message[1] > 0, std::numeric_limits<double>::quiet_NaN());
}

/// Adds up, or takes the maximum of, the `totals` of those sets that are cut over `group`.
void reduce_over(
    const ProcessGroup& group, const std::vector<ShardedGradients>& sets, bool is_max,
    std::vector<at::Tensor>& totals) {
  std::vector<size_t> cut;
  std::vector<at::Tensor> own;
  for (size_t i = 0; i < sets.size(); ++i) {
    const auto& groups = sets[i].sharded_over;
    if (std::find(groups.begin(), groups.end(), group) == groups.end()) continue;
    cut.push_back(i);
    own.push_back(totals[i].to(carrier_device(*group)));
  }
  auto values = at::stack(own);
  if (is_max) {
    values = max_over(group, values);
  } else {
    all_reduce(values, c10d::ReduceOp::SUM, group);
  }
  for (size_t i = 0; i < cut.size(); ++i) totals[cut[i]] = values[static_cast<int64_t>(i)];
}

double total_norm(const std::vector<ShardedGradients>& sets, double norm_type) {
  const bool is_max = std::isinf(norm_type);
  std::vector<ProcessGroup> groups;  // each once, in an order that is the same on all ranks
  std::vector<at::Tensor> totals;
  for (const auto& set : sets) {
    totals.push_back(sum_of_powers(set.gradients, norm_type));
    for (const auto& group : set.sharded_over) {
      DDP_CHECK_VALUE(
          group, "clip_grad_norm_: expected groups of this rank in sharded_over, got an empty one.",
          " Leave out groups that the rank is not in.");
      if (std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(group);
    }
  }
  for (const auto& group : groups) reduce_over(group, sets, is_max, totals);
  if (totals.empty()) return 0;
  for (auto& total : totals) total = total.to(totals.front().device());
  const auto all = at::stack(totals);
  if (is_max) return all.max().item<double>();
  const auto sum = all.sum().item<double>();
  return norm_type == 0 ? sum : std::pow(sum, 1 / norm_type);
}

double clip(const std::vector<ShardedGradients>& sets, double max_norm, double norm_type) {
  const bool is_cut = std::any_of(
      sets.begin(), sets.end(), [](const auto& set) { return !set.sharded_over.empty(); });
  DDP_CHECK_VALUE(
      norm_type > 0 || (norm_type == 0 && !is_cut), "clip_grad_norm_: expected a norm_type above 0",
      is_cut ? " for parts of tensors" : "", ", got ", norm_type, ". 2 is usual.");
  const at::NoGradGuard no_grad;
  const auto norm = total_norm(sets, norm_type);
  constexpr double kEpsilon = 1e-6;  // as in torch
  const double scale = max_norm / (norm + kEpsilon);
  if (scale < 1 || std::isnan(scale)) {
    for (const auto& set : sets) {
      for (const auto& gradient : set.gradients) gradient.mul_(scale);
    }
  }
  return norm;
}

}  // namespace

void zero_grad(torch::optim::Optimizer& optimizer, bool set_to_none) {
  if (auto* sharded = as_sharded(optimizer)) {
    sharded->zero_grad(set_to_none);
  } else {
    optimizer.zero_grad(set_to_none);
  }
}

double clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm, double norm_type) {
  const auto* sharded = as_sharded(optimizer);
  if (sharded) check_may_clip("clip_grad_norm_", *sharded);
  std::vector<ProcessGroup> sharded_over;
  if (sharded && sharded->options().stage() == 2) sharded_over = {sharded->process_group()};
  return clip({{gradients_of(optimizer), std::move(sharded_over)}}, max_norm, norm_type);
}

double clip_grad_norm_(
    const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
    const std::vector<ProcessGroup>& sharded_over) {
  SeenTensors seen;
  return clip({{gradients_of(parameters, seen), sharded_over}}, max_norm, norm_type);
}

double clip_grad_norm_(
    const torch::nn::Module& module, double max_norm, double norm_type,
    const std::vector<ProcessGroup>& sharded_over) {
  return clip_grad_norm_(module.parameters(), max_norm, norm_type, sharded_over);
}

double clip_grad_norm_(
    const std::vector<ShardedParameters>& sets, double max_norm, double norm_type) {
  SeenTensors seen;
  std::vector<ShardedGradients> gradients;
  for (const auto& set : sets) {
    gradients.push_back({gradients_of(set.parameters, seen), set.sharded_over});
  }
  return clip(gradients, max_norm, norm_type);
}

void clip_grad_value_(torch::optim::Optimizer& optimizer, double clip_value) {
  const auto* sharded = as_sharded(optimizer);
  if (sharded) check_may_clip("clip_grad_value_", *sharded);
  const at::NoGradGuard no_grad;
  for (const auto& gradient : gradients_of(optimizer)) gradient.clamp_(-clip_value, clip_value);
}

}  // namespace ddp
