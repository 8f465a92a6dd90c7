#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/gradients.h>
#include <ddp/parameter_layout.h>
#include <ddp/process_group.h>

namespace ddp {

/// Gradients that are cut over the same groups.
struct ShardedGradients {
  std::vector<at::Tensor> gradients;
  std::vector<ProcessGroup> sharded_over;
  /// The parameters' device: all ranks of the groups have them, with or without a gradient. Nothing
  /// where a rank may have none.
  std::optional<c10::Device> device = {};
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

/// This rank's sum of |element|^norm_type, or its largest |element|: one double, on the device of
/// the first gradient.
///
/// \param device  of the result where there is no gradient.
at::Tensor sum_of_powers(
    const std::vector<at::Tensor>& gradients, double norm_type, c10::Device device = at::kCPU);

/// The same over the ranks of a group, of one or more such numbers.
///
/// \param device  of the parameters, where each rank of the group has some. The host does not wait
///         for it, if the group has a backend for it.
///
/// Collective: one all-reduce.
at::Tensor reduce_powers(
    const ProcessGroup& group, const at::Tensor& own, double norm_type,
    const std::optional<c10::Device>& device = {});

/// Scales the gradients, whose norm follows from the sum of powers, so that it is at most
/// `max_norm`. On a device without waiting for it.
GradientNorm clip_to(
    const std::vector<ShardedGradients>& sets, const at::Tensor& powers, double norm_type,
    double max_norm);

/// clip_grad_norm_() of sets whose gradients are no longer looked for.
///
/// \param over_all  further groups, over which all sets are cut. Their ranks may have other sets.
/// \param copies  gradients that other ranks of over_all count: they are scaled alone.
///
/// Collective: over the sets' groups; then one all-reduce of a number over each of `over_all`.
GradientNorm clip_sets(
    const std::vector<ShardedGradients>& sets, double max_norm, double norm_type,
    const std::vector<ProcessGroup>& over_all = {}, const std::vector<at::Tensor>& copies = {});

}  // namespace ddp
