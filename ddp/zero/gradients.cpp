#include <ddp/gradients.h>

#include <cmath>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ddp/collectives.h>
#include <ddp/internal/check.h>
#include <ddp/zero.h>
#include <torch/nn/utils/clip_grad.h>

namespace ddp {
namespace {

/// The optimizer as a sharded one; null for others.
ZeroRedundancyOptimizerBase* as_sharded(torch::optim::Optimizer& optimizer) {
  return dynamic_cast<ZeroRedundancyOptimizerBase*>(&optimizer);
}

std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups()) {
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  }
  return parameters;
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

/// The norm of all ranks' parts together.
double norm_of_parts(
    const std::vector<at::Tensor>& parts, const ZeroRedundancyOptimizerBase& optimizer,
    double norm_type) {
  const bool is_max = std::isinf(norm_type);
  double own = 0;
  for (const auto& part : parts) {
    const auto norm = at::linalg_vector_norm(part, norm_type).item<double>();
    // Not std::max, which would drop a NaN.
    if (is_max) {
      own = norm > own || std::isnan(norm) ? norm : own;
    } else {
      own += std::pow(norm, norm_type);
    }
  }
  auto total = at::full({1}, own, at::dtype(at::kDouble).device(optimizer.join_device()));
  all_reduce(total, is_max ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM, optimizer.process_group());
  const auto norm = total.item<double>();
  return is_max ? norm : std::pow(norm, 1 / norm_type);
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
  DDP_CHECK_VALUE(
      norm_type > 0, "clip_grad_norm_: expected a norm_type above 0, got ", norm_type,
      ". 2 is usual.");
  const at::NoGradGuard no_grad;
  if (!sharded || sharded->options().stage() == 1) {
    return torch::nn::utils::clip_grad_norm_(parameters_of(optimizer), max_norm, norm_type);
  }
  const auto parts = sharded->gradients();
  const auto norm = norm_of_parts(parts, *sharded, norm_type);
  constexpr double kEpsilon = 1e-6;  // as in torch
  const double scale = max_norm / (norm + kEpsilon);
  if (scale < 1 || std::isnan(scale)) {
    for (const auto& part : parts) part.mul_(scale);
  }
  return norm;
}

void clip_grad_value_(torch::optim::Optimizer& optimizer, double clip_value) {
  const auto* sharded = as_sharded(optimizer);
  if (sharded) check_may_clip("clip_grad_value_", *sharded);
  const at::NoGradGuard no_grad;
  if (sharded) {
    for (const auto& gradient : sharded->gradients()) gradient.clamp_(-clip_value, clip_value);
  } else {
    torch::nn::utils::clip_grad_value_(parameters_of(optimizer), clip_value);
  }
}

}  // namespace ddp
