#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ddp/comm_hooks.h>
#include <ddp/internal/reducer.h>
#include <ddp/mixed_precision.h>

#include "low_precision_parameters.h"
#include "module_state.h"

namespace ddp {

/// For the ranks' comparison, and errors.
std::string describe(const MixedPrecision& options);

/// The precision of a wrapper's forward passes.
class ModelPrecision {
 public:
  explicit ModelPrecision(const MixedPrecision& options) : options_(options) {}

  /// \throws c10::ValueError  for a dtype that cannot be; for a reduction in low precision to
  ///         something other than the mean; for sparse gradients, which autograd does not cast.
  void check(const std::vector<NamedParameter>& trained, bool reduces_to_mean) const;
  /// Takes over a module, once its ranks are equal: its buffers get their dtype.
  void adopt(const std::vector<StateTensor>& state);

  /// The module's forward begins; one of the other two follows.
  void begin_forward();
  /// \param complete  whether `outputs` are all tensors that it returned.
  /// \throws c10::Error  where they are not, since backward has to be noticed.
  void end_forward(const std::vector<at::Tensor>& outputs, bool complete);
  void abandon_forward() noexcept;

  /// As LowPrecisionParameters::read(); at once where the parameters stay as they are.
  void read(const std::function<void(const LowPrecisionParameters::ValueOf&)>& read) const;
  /// Whether casts stand in for parameters in passes.
  bool replaces_parameters() const { return parameters_ != nullptr; }
  /// Whether the parameters may be read as they are, for no other thread puts casts in their place.
  bool are_of_this_thread() const { return !parameters_ || parameters_->are_of_this_thread(); }

  /// The parameters with the values that they have between steps, also while a pass uses others.
  std::vector<at::Tensor> originals(std::vector<at::Tensor> parameters) const;

  /// Of forward's floating arguments.
  std::optional<at::ScalarType> input_dtype() const { return options_.param_dtype(); }
  /// What averages gradients in low precision; none where they travel as they are.
  CommHook reduction(const ProcessGroup& group) const;

 private:
  const MixedPrecision options_;
  std::shared_ptr<LowPrecisionParameters> parameters_;  // null where they stay as they are
};

}  // namespace ddp
