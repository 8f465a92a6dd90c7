#include <ddp/gradients.h>

#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ddp/internal/check.h>
#include <ddp/zero.h>

#include "clip/gradient_norm.h"
#include "wrapper/model_tensors.h"

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
  if (!sharded) return clip_sets({{gradients_of(optimizer), {}}}, max_norm, norm_type);
  check_may_clip("clip_grad_norm_", *sharded);
  return clip_sets(sharded->gradient_sets(), max_norm, norm_type);
}

double clip_grad_norm_(
    const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
    const std::vector<ProcessGroup>& sharded_over) {
  SeenTensors seen;
  return clip_sets({{gradients_of(parameters, seen), sharded_over}}, max_norm, norm_type);
}

double clip_grad_norm_(
    const std::vector<ShardedParameters>& sets, double max_norm, double norm_type) {
  SeenTensors seen;
  std::vector<ShardedGradients> gradients;
  for (const auto& set : sets) {
    gradients.push_back({gradients_of(set.parameters, seen), set.sharded_over});
  }
  return clip_sets(gradients, max_norm, norm_type);
}

void clip_grad_value_(torch::optim::Optimizer& optimizer, double clip_value) {
  const auto* sharded = as_sharded(optimizer);
  if (sharded) check_may_clip("clip_grad_value_", *sharded);
  const at::NoGradGuard no_grad;
  for (const auto& gradient : gradients_of(optimizer)) gradient.clamp_(-clip_value, clip_value);
}

}  // namespace ddp
