#pragma once

#include <cstdint>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

namespace ddp {

/// Steps an optimizer for some of its parameters at a time.
///
/// LibTorch's optimizers update each parameter on its own, so several partial steps equal one whole
/// step. For a partial step, the other parameters are removed from the optimizer's groups.
class OptimizerInBackward {
 public:
  /// \param reduced  all parameters that `step` will get, in parts.
  /// \throws c10::ValueError  for no optimizer, for LBFGS, which looks at all gradients together,
  ///         and for one that has none of the parameters.
  OptimizerInBackward(
      std::shared_ptr<torch::optim::Optimizer> optimizer, const std::vector<at::Tensor>& reduced);

  /// \param last  whether this is the last part of a pass; parameters that are not reduced are
  ///        stepped with it.
  ///
  /// Cost: beside the step, a look at every parameter.
  void step(const std::vector<at::Tensor>& part, bool last);

  /// Whether this thread is in the optimizer's step of such a call.
  static bool is_stepping();

 private:
  void warn_of_second_step();

  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  std::unordered_set<const void*> reduced_;
  std::vector<std::pair<at::Tensor, uint64_t>> stepped_;  // in the last pass, with a value sample
  bool is_first_part_ = true;                             // the next part is a pass's first
  int changed_passes_ = 0;  // successive passes after which most parameters were changed
};

}  // namespace ddp
