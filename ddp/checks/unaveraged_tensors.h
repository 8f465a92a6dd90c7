// Warnings of tensors that train without being averaged.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/process_group.h>
#include <torch/nn/module.h>

#include "wrapper/model_tensors.h"

namespace ddp {

/// Warns of parameters that were registered after the module was wrapped.
class ParameterWatch {
 public:
  /// Remembers the parameters that `root` has now. `root` outlives this.
  ParameterWatch(const torch::nn::Module& root, const Names& ignored);

  /// Warns of the parameters that require a gradient and were registered since, without the ignored
  /// ones, of each once.
  ///
  /// Cost: a walk over all modules, about 0.1 us each; more only where something has changed.
  void warn_of_new(const GroupMonitor& monitor);

 private:
  std::vector<std::string> find_new();

  const torch::nn::Module& root_;
  const Names ignored_;
  std::vector<const void*> tensors_;  // TensorImpls, in the order of a walk over the modules
  Names known_;
};

/// Warns of a learnable tensor of no wrapped module (a policy's log_std) that an optimizer steps on
/// each rank's own gradients. Such a tensor
///   - is a leaf of the graph of an averaged backward pass, so it gets a gradient there;
///   - has a gradient that no reducer averages;
///   - is no parameter of the module;
///   - has another value in the next averaged backward pass;
///   - and not the same one on all ranks, as a moving average of the model's parameters has.
class StrayTensors {
 public:
  /// \param module  its parameters are no strays, averaged or not.
  explicit StrayTensors(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {}

  /// Call it at the begin of each averaged backward pass, on the thread that runs it.
  ///
  /// Cost: a walk over the nodes of the first few passes' graphs; then nothing.
  void begin_backward();
  /// Whether tensors changed since the last pass: all ranks have to compare them.
  bool has_stepped() const { return !stepped_.empty(); }
  /// Warns on ranks where tensors changed, if their values differ between the ranks. Warns once.
  ///
  /// Collective: yes. Blocks: host. Cost: reads these tensors once.
  void compare(const ProcessGroup& group, GroupMonitor& monitor);

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Stray {
    WeakTensor tensor;
    uint64_t sample;  // of its value
  };

  void collect();

  const std::shared_ptr<torch::nn::Module> module_;
  std::vector<Stray> strays_;                // of the previous pass
  std::map<std::string, uint64_t> stepped_;  // a hash of those of each shape and dtype
  int passes_ = 0;
};

}  // namespace ddp
