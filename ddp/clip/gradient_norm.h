#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/parameter_layout.h>
#include <ddp/process_group.h>

namespace ddp {

/// Gradients that are cut over the same groups.
struct ShardedGradients {
  std::vector<at::Tensor> gradients;
  std::vector<ProcessGroup> sharded_over;
};

/// Collects gradients by the groups over which they are cut.
class GradientSets {
 public:
  /// Adds a set, if an empty one, for the groups: ranks without a gradient take part, too. So every
  /// rank has the sets in the same order.
  ///
  /// \param gradient  of the layout's parameter, or this rank's part of it; may be undefined.
  /// \throws c10::ValueError  if that is a part of a sum.
  void add(
      const ParameterLayout& layout, const std::vector<ProcessGroup>& groups,
      const at::Tensor& gradient);

  const std::vector<ShardedGradients>& sets() const { return sets_; }

 private:
  std::vector<ShardedGradients> sets_;
};

/// This rank's sum of |element|^norm_type, or its largest |element|: one double.
at::Tensor sum_of_powers(const std::vector<at::Tensor>& gradients, double norm_type);

/// The same over the ranks of a group, of one or more such numbers.
///
/// Collective: one all-reduce.
at::Tensor reduce_powers(const ProcessGroup& group, const at::Tensor& own, double norm_type);

/// The norm of all, from their sum of powers.
double norm_of(const at::Tensor& powers, double norm_type);

/// Scales gradients of that norm, so that it is at most `max_norm`.
void scale_to_norm(const std::vector<ShardedGradients>& sets, double norm, double max_norm);

/// clip_grad_norm_() of sets whose gradients are no longer looked for.
///
/// \param over_all  further groups, over which all sets are cut. Their ranks may have other sets.
/// \param copies  gradients that other ranks of over_all count: they are scaled alone.
///
/// Collective: over the sets' groups; then one all-reduce of a number over each of `over_all`.
double clip_sets(
    const std::vector<ShardedGradients>& sets, double max_norm, double norm_type,
    const std::vector<ProcessGroup>& over_all = {}, const std::vector<at::Tensor>& copies = {});

}  // namespace ddp
