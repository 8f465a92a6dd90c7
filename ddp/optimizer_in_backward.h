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
  void tell_second_step();

  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  std::unordered_set<const void*> reduced_;
  std::vector<std::pair<at::Tensor, uint64_t>> stepped_;  // in the last pass, and its value then
  bool begins_ = true;                                    // the next part is a pass's first
  int changed_passes_ = 0;  // one after the other, behind which something changed the parameters
};

}  // namespace ddp
