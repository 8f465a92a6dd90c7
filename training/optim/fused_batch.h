// The arguments of fused optimizers' kernels: lists of tensors of one device and dtype, in which
// the tensors of a parameter lie alike.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

namespace ddp {

/// How a step's gradients are scaled, and whether it is skipped; undefined where neither.
struct StepScaling {
  at::Tensor grad_scale;
  at::Tensor found_inf;
};

/// Parameters that one call of a kernel steps.
class FusedBatch {
 public:
  FusedBatch(std::string subject, const StepScaling& scaling, c10::Device device);

  c10::Device device() const { return device_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const std::vector<at::Tensor>& gradients() const { return gradients_; }
  const std::optional<at::Tensor>& grad_scale() const { return grad_scale_; }
  const std::optional<at::Tensor>& found_inf() const { return found_inf_; }

  void add(const at::Tensor& parameter);

  /// Returns a parameter's tensor of the optimizer's state as the kernels take it: `state`, made
  /// with `value` everywhere where it is undefined, and laid out anew where it lies in memory
  /// otherwise than the parameter.
  ///
  /// \throws c10::ValueError  another shape, dtype or device than the parameter's.
  const at::Tensor& like_parameter(
      at::Tensor& state, const at::Tensor& parameter, double value = 0) const;

  /// Call it after the kernel: writes gradients that a scale divided back where a copy was stepped,
  /// and raises the parameters' versions, which the kernels do not.
  void finish();

 private:
  std::string subject_;
  c10::Device device_;
  std::optional<at::Tensor> grad_scale_, found_inf_;  // on the parameters' device
  std::vector<at::Tensor> parameters_, gradients_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // of gradients: the gradient, its copy
};

/// The parameters of a group that have a gradient, in batches.
using BatchesOfGroup = std::vector<FusedBatch>;

/// Returns the batches of each group. Checks all parameters first, so that an error leaves the
/// optimizer as it was.
///
/// \param subject  the optimizer's name, for errors.
/// \throws c10::ValueError  a parameter or gradient that the kernels do not take; see
///         <ddp/optim.h>.
std::vector<BatchesOfGroup> fused_batches(
    const std::string& subject, const torch::optim::Optimizer& optimizer,
    const StepScaling& scaling);

}  // namespace ddp
