#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/group_monitor.h>
#include <torch/nn/module.h>

namespace ddp {

/// Warns of a learnable tensor of no wrapped module (a policy's log_std) that an optimizer steps on
/// each rank's own gradients. Such a tensor
///   - is a leaf of the graph of an averaged backward pass, so it gets a gradient there;
///   - has a gradient that no reducer averages;
///   - is no parameter of the module;
///   - has another value in the next averaged backward pass.
class StrayTensors {
 public:
  /// \param module  its parameters are no strays, averaged or not.
  explicit StrayTensors(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {}

  /// Call it at the begin of each averaged backward pass, on the thread that runs it. Warns once.
  ///
  /// Cost: a walk over the nodes of the first few passes' graphs; then nothing.
  void warn_of_stepped(const GroupMonitor& monitor);

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Stray {
    WeakTensor tensor;
    uint64_t sample;  // of its value
  };

  /// Shape and dtype of the first tensor that was stepped, once; "" where none was.
  std::string find_stepped();
  void collect();

  const std::shared_ptr<torch::nn::Module> module_;
  std::vector<Stray> strays_;  // of the previous pass
  int passes_ = 0;
};

}  // namespace ddp
