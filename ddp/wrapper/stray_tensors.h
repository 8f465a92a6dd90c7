#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace ddp {

/// Finds learnable tensors of no wrapped module (a policy's log_std) that an optimizer steps on
/// each rank's own gradients: they get a gradient in an averaged backward pass that no reducer
/// averages, and have another value in the next one.
class StrayTensors {
 public:
  /// \param module  its parameters are no strays, averaged or not.
  explicit StrayTensors(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {}

  /// Call it at the begin of each averaged backward pass, on the thread that runs it.
  ///
  /// \return shape and dtype of the first tensor that was stepped, once; "" where none was.
  /// Cost: a walk over the nodes of the first few passes' graphs; then nothing.
  std::string find_stepped();

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Stray {
    WeakTensor tensor;
    uint64_t sample;  // of its value
  };

  void collect();

  const std::shared_ptr<torch::nn::Module> module_;
  std::vector<Stray> strays_;  // of the previous pass
  int passes_ = 0;
};

}  // namespace ddp
