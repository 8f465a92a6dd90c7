#include "clip/gradient_norm.h"

#include <cmath>
#include <limits>
#include <optional>

#include <ATen/core/functional.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ddp/collectives.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>

namespace ddp {
namespace {

/// MAX of a backend may drop a NaN, so the places of NaN are reduced beside the values.
at::Tensor max_over(const ProcessGroup& group, const at::Tensor& values) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  auto message =
      at::stack({values.nan_to_num(kInfinity, kInfinity), values.isnan().to(at::kDouble)});
  all_reduce(message, c10d::ReduceOp::MAX, group);
  return message[0].masked_fill(message[1] > 0, std::numeric_limits<double>::quiet_NaN());
}

/// The device of a message of the group's ranks.
c10::Device message_device(
    const ProcessGroup& group, const std::optional<c10::Device>& of_parameters) {
  const auto is_it = [&](const auto& device) { return device.type() == of_parameters->type(); };
  const bool is_served = of_parameters && any_of(group->getDeviceTypes(), is_it);
  return is_served ? *of_parameters : carrier_device(*group);
}

/// Adds up, or takes the maximum of, the `totals` of those sets that are cut over `group`.
void reduce_over(
    const ProcessGroup& group, const std::vector<ShardedGradients>& sets, double norm_type,
    std::vector<at::Tensor>& totals) {
  std::vector<size_t> cut;
  std::optional<c10::Device> device;
  for (size_t i = 0; i < sets.size(); ++i) {
    if (!contains(sets[i].sharded_over, group)) continue;
    device = cut.empty() || device == sets[i].device ? sets[i].device : std::nullopt;
    cut.push_back(i);
  }
  const auto to = message_device(group, device);
  const auto own = c10::fmap(cut, [&](size_t i) { return totals[i].to(to); });
  const auto values = reduce_powers(group, at::stack(own), norm_type, device);
  for (size_t i = 0; i < cut.size(); ++i) totals[cut[i]] = values[static_cast<int64_t>(i)];
}

/// Dense ones of a device and dtype together: few kernels for many tensors.
struct Batches {
  explicit Batches(const std::vector<at::Tensor>& tensors) {
    for (const auto& tensor : tensors) {
      const bool is_alone = tensor.is_cpu() || tensor.layout() != at::kStrided;
      const auto fits = [&](const std::vector<at::Tensor>& batch) {
        return batch[0].device() == tensor.device() && batch[0].dtype() == tensor.dtype();
      };
      auto batch = is_alone ? together.end() : find_if(together, fits);
      if (is_alone) {
        alone.push_back(tensor);
      } else if (batch == together.end()) {
        together.push_back({tensor});
      } else {
        batch->push_back(tensor);
      }
    }
  }
  std::vector<at::Tensor> alone;
  std::vector<std::vector<at::Tensor>> together;
};

/// \param scale  a float64 scalar.
void scale_all(const std::vector<at::Tensor>& gradients, const at::Tensor& scale) {
  const Batches batches(gradients);
  if (!batches.alone.empty()) {
    const auto value = scale.item<double>();
    for (auto gradient : batches.alone) gradient.mul_(value);
  }
  for (const auto& batch : batches.together) {
    if (scale.is_cpu()) {
      at::_foreach_mul_(batch, scale.item());
    } else {
      at::_foreach_mul_(batch, scale.to(batch[0].options()));
    }
  }
}

void check_group(const ProcessGroup& group) {
  DDP_CHECK_VALUE(
      group, "clip_grad_norm_: expected groups of this rank in sharded_over, got an empty one.",
      " Leave out groups that the rank is not in.");
}

/// This rank's sum of powers, or largest element, of all sets: each with what the other ranks of
/// its groups have.
at::Tensor powers_of(const std::vector<ShardedGradients>& sets, double norm_type) {
  std::vector<ProcessGroup> groups;  // each once, in an order that is the same on all ranks
  std::vector<at::Tensor> totals;
  for (const auto& set : sets) {
    const auto device = set.device.value_or(c10::Device(at::kCPU));
    totals.push_back(sum_of_powers(set.gradients, norm_type, device));
    for (const auto& group : set.sharded_over) {
      check_group(group);
      if (!contains(groups, group)) groups.push_back(group);
    }
  }
  for (const auto& group : groups) reduce_over(group, sets, norm_type, totals);
  if (totals.empty()) return at::zeros({}, at::kDouble);
  for (auto& total : totals) total = total.to(totals.front().device());
  const auto all = at::stack(totals);
  return std::isinf(norm_type) ? all.max() : all.sum();
}

}  // namespace

void GradientSets::add(
    const ParameterLayout& layout, const std::vector<ProcessGroup>& groups,
    const at::Tensor& gradient) {
  auto set =
      find_if(sets_, [&](const ShardedGradients& known) { return known.sharded_over == groups; });
  if (set == sets_.end()) set = sets_.insert(set, {{}, groups, layout.local.device()});
  // A pipeline's other stages may have none of it.
  if (layout.stage || set->device != layout.local.device()) set->device.reset();
  if (!gradient.defined()) return;
  DDP_CHECK_VALUE(
      !layout.partial, "clip_grad_norm_: expected complete gradients, got a part of a sum of ",
      layout.name, ". Sum it over the ranks before.");
  set->gradients.push_back(gradient);
}

at::Tensor sum_of_powers(
    const std::vector<at::Tensor>& gradients, double norm_type, c10::Device device) {
  if (norm_type == 0) return at::full({}, static_cast<double>(gradients.size()), at::kDouble);
  std::vector<at::Tensor> dense;
  for (const auto& gradient : gradients) {
    const auto values = gradient.is_sparse() ? gradient.coalesce().values() : gradient;
    if (values.numel() > 0) dense.push_back(values);  // else a largest element does not exist
  }
  if (dense.empty()) return at::zeros({}, at::dtype(at::kDouble).device(device));
  const auto sum_type = [](const at::Tensor& t) {
    const bool is_reduced = at::isReducedFloatingType(t.scalar_type());
    return is_reduced ? std::optional(at::kFloat) : std::nullopt;
  };
  const auto to = dense.front().device();
  std::vector<at::Tensor> norms;
  const Batches batches(dense);
  for (const auto& t : batches.alone) {
    const auto norm = at::linalg_vector_norm(t, norm_type, {}, false, sum_type(t));
    norms.push_back(norm.to(to, at::kDouble).view(1));
  }
  for (const auto& batch : batches.together) {
    const auto of_batch = at::_foreach_norm(batch, norm_type, sum_type(batch[0]));
    norms.push_back(at::stack(of_batch).to(to, at::kDouble));
  }
  const auto all = at::cat(norms);
  return std::isinf(norm_type) ? all.max() : all.pow(norm_type).sum();
}

at::Tensor reduce_powers(
    const ProcessGroup& group, const at::Tensor& own, double norm_type,
    const std::optional<c10::Device>& device) {
  auto values = own.to(message_device(group, device), at::kDouble, false, /*copy=*/true);
  if (std::isinf(norm_type)) return max_over(group, values);
  all_reduce(values, c10d::ReduceOp::SUM, group);
  return values;
}

GradientNorm clip_to(
    const std::vector<ShardedGradients>& sets, const at::Tensor& powers, double norm_type,
    double max_norm) {
  constexpr double kEpsilon = 1e-6;  // as in torch
  const bool is_root = !std::isinf(norm_type) && norm_type != 0;
  const auto total = powers.reshape({});
  const auto norm = is_root ? total.pow(1 / norm_type) : total;
  const auto scale = at::full_like(norm, max_norm).div_(norm + kEpsilon);
  // On a device the product with 1 costs less than a wait.
  if (scale.is_cpu() && scale.item<double>() >= 1) return GradientNorm(norm);
  const auto at_most_one = scale.clamp_max(1);
  for (const auto& set : sets) scale_all(set.gradients, at_most_one);
  return GradientNorm(norm);
}

GradientNorm clip_sets(
    const std::vector<ShardedGradients>& sets, double max_norm, double norm_type,
    const std::vector<ProcessGroup>& over_all, const std::vector<at::Tensor>& copies) {
  for (const auto& group : over_all) check_group(group);
  const bool is_cut =
      !over_all.empty() || any_of(sets, [](const auto& set) { return !set.sharded_over.empty(); });
  DDP_CHECK_VALUE(
      norm_type > 0 || (norm_type == 0 && !is_cut), "clip_grad_norm_: expected a norm_type above 0",
      is_cut ? " for parts of tensors" : "", ", got ", norm_type, ". 2 is usual.");
  const at::NoGradGuard no_grad;
  auto powers = powers_of(sets, norm_type).view(1);
  for (const auto& group : over_all) powers = reduce_powers(group, powers, norm_type);
  auto scaled = sets;
  scaled.push_back({copies, {}});
  return clip_to(scaled, powers, norm_type, max_norm);
}

}  // namespace ddp
