#include "clip/gradient_norm.h"

#include <cmath>
#include <limits>
#include <optional>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/full.h>
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

/// Adds up, or takes the maximum of, the `totals` of those sets that are cut over `group`.
void reduce_over(
    const ProcessGroup& group, const std::vector<ShardedGradients>& sets, double norm_type,
    std::vector<at::Tensor>& totals) {
  std::vector<size_t> cut;
  std::vector<at::Tensor> own;
  for (size_t i = 0; i < sets.size(); ++i) {
    if (!contains(sets[i].sharded_over, group)) continue;
    cut.push_back(i);
    own.push_back(totals[i].to(carrier_device(*group)));
  }
  const auto values = reduce_powers(group, at::stack(own), norm_type);
  for (size_t i = 0; i < cut.size(); ++i) totals[cut[i]] = values[static_cast<int64_t>(i)];
}

/// Dense ones of a device together: one kernel for many tensors.
void scale_all(const std::vector<at::Tensor>& gradients, double scale) {
  std::vector<at::Tensor> together;
  for (const auto& gradient : gradients) {
    const bool alone = gradient.is_cpu() || gradient.layout() != at::kStrided ||
                       (!together.empty() && (together[0].device() != gradient.device() ||
                                              together[0].dtype() != gradient.dtype()));
    if (alone) {
      at::Tensor(gradient).mul_(scale);
    } else {
      together.push_back(gradient);
    }
  }
  if (!together.empty()) at::_foreach_mul_(together, scale);
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
    totals.push_back(sum_of_powers(set.gradients, norm_type));
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
  if (set == sets_.end()) set = sets_.insert(set, {{}, groups});
  if (!gradient.defined()) return;
  DDP_CHECK_VALUE(
      !layout.partial, "clip_grad_norm_: expected complete gradients, got a part of a sum of ",
      layout.name, ". Sum it over the ranks before.");
  set->gradients.push_back(gradient);
}

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

at::Tensor reduce_powers(const ProcessGroup& group, const at::Tensor& own, double norm_type) {
  if (std::isinf(norm_type)) return max_over(group, own);
  auto values = own.clone();
  all_reduce(values, c10d::ReduceOp::SUM, group);
  return values;
}

double norm_of(const at::Tensor& powers, double norm_type) {
  const auto value = powers.item<double>();
  return std::isinf(norm_type) || norm_type == 0 ? value : std::pow(value, 1 / norm_type);
}

void scale_to_norm(const std::vector<ShardedGradients>& sets, double norm, double max_norm) {
  constexpr double kEpsilon = 1e-6;  // as in torch
  const double scale = max_norm / (norm + kEpsilon);
  if (scale >= 1) return;
  for (const auto& set : sets) scale_all(set.gradients, scale);
}

double clip_sets(
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
  for (const auto& group : over_all) {
    powers = reduce_powers(group, powers.to(carrier_device(*group)), norm_type);
  }
  const auto norm = norm_of(powers, norm_type);
  scale_to_norm(sets, norm, max_norm);
  scale_to_norm({{copies, {}}}, norm, max_norm);
  return norm;
}

}  // namespace ddp
