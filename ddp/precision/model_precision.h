#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ddp/internal/reducer.h>
#include <ddp/mixed_precision.h>

#include "precision/low_precision_parameters.h"
#include "wrapper/model_tensors.h"

namespace ddp {

/// Text for the comparison of ranks, and for errors.
std::string describe(const MixedPrecision& options);

/// The precision of a wrapper's forward passes.
class ModelPrecision {
 public:
  explicit ModelPrecision(const MixedPrecision& options) : options_(options) {}

  /// \throws c10::ValueError  for a dtype that is not supported; for a reduction in low precision
  ///         to something other than the mean; for sparse gradients, which autograd does not cast.
  void check(const std::vector<NamedParameter>& trained, bool reduces_to_mean) const;
  /// Casts a module's buffers, and prepares its parameters. After all ranks have equal values.
  void apply_to(const std::vector<StateTensor>& state);

  /// Call it before the module's forward, and one of the other two after it.
  void begin_forward();
  /// \param complete  whether `outputs` are all tensors that it returned.
  /// \throws c10::Error  if they are not: without a hook on an output, the begin of backward would
  ///         be missed.
  void end_forward(const std::vector<at::Tensor>& outputs, bool complete);
  void abandon_forward() noexcept;

  /// As LowPrecisionParameters::read(); reads at once where parameters are not replaced.
  void read(const std::function<void(const LowPrecisionParameters::ValueOf&)>& read) const;
  bool replaces_parameters() const { return parameters_ != nullptr; }
  /// Whether this thread may read the parameters directly: no other thread replaces them by casts.
  bool may_read_directly() const { return !parameters_ || parameters_->may_read_directly(); }

  /// Restores parameters that a backward pass has not used.
  void end_backward() const noexcept;
  /// As LowPrecisionParameters::with_originals().
  void with_originals(c10::function_ref<void()> act) const;
  /// The parameters with the values that they have between steps, also while a pass uses casts.
  std::vector<at::Tensor> originals(std::vector<at::Tensor> parameters) const;

  /// The dtype of forward's floating arguments.
  std::optional<at::ScalarType> input_dtype() const { return options_.param_dtype(); }
  /// The low precision in which gradients are averaged; none where they are sent as they are.
  std::optional<at::ScalarType> reduction_dtype() const;

 private:
  const MixedPrecision options_;
  std::shared_ptr<LowPrecisionParameters> parameters_;  // null where they are not replaced
};

}  // namespace ddp
