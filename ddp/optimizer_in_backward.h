#pragma once

#include <memory>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

namespace ddp {

/// Steps an optimizer for some of its parameters at a time.
///
/// LibTorch's optimizers update each parameter on its own, so the parts of a step come to the same
/// as the whole: this hides from the optimizer what is not to be stepped.
class OptimizerInBackward {
 public:
  /// \param reduced  what `step` gets parts of.
  /// \throws c10::ValueError  for no optimizer, for LBFGS, which looks at all gradients together,
  ///         and for one that has none of the parameters.
  OptimizerInBackward(
      std::shared_ptr<torch::optim::Optimizer> optimizer, const std::vector<at::Tensor>& reduced);

  /// \param last  of a pass: what the optimizer has beside the reduced parameters comes with it.
  ///
  /// Cost: beside the step, a look at every parameter.
  void step(const std::vector<at::Tensor>& part, bool last);

 private:
  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  std::unordered_set<const void*> reduced_;
};

}  // namespace ddp
