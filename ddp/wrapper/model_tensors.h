#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/reducer.h>
#include <torch/nn/module.h>

#include "wrapper/module_state.h"

namespace ddp {

/// The tensors that a wrapper keeps equal on all ranks: the module's parameters and buffers without
/// the ignored names, and the tensors of also_average(), which are of no module.
class ModelTensors {
 public:
  ModelTensors(std::shared_ptr<torch::nn::Module> module, const std::vector<std::string>& ignored)
      : module_(std::move(module)), ignored_(ignored.begin(), ignored.end()) {}

  /// Null only where the program wrapped an empty holder.
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  const Names& ignored() const { return ignored_; }
  const std::vector<at::Tensor>& outside() const { return outside_; }
  void set_outside(std::vector<at::Tensor> tensors) { outside_ = std::move(tensors); }

  /// The parameters whose gradients are averaged, in the order of the reducer.
  std::vector<NamedParameter> trained() const;
  /// All parameters, then all buffers, then the tensors outside.
  std::vector<StateTensor> state(bool with_buffers = true) const;
  /// Clears all gradients.
  void zero_grad(bool set_to_none) const;

  /// Remembers the parameters that require no gradient now.
  void remember_frozen() { frozen_ = frozen_parameters(*module_, ignored_); }
  const std::vector<NamedParameter>& frozen() const { return frozen_; }
  /// The names of those that require one since.
  std::vector<std::string> unfrozen() const;

  /// Why the module no longer gives the parameters `which` of `trained` a gradient.
  std::vector<MissingGradient> explain_missing(
      const std::vector<NamedParameter>& trained, const std::vector<size_t>& which) const;

 private:
  const std::shared_ptr<torch::nn::Module> module_;
  const Names ignored_;
  std::vector<at::Tensor> outside_;
  std::vector<NamedParameter> frozen_;
};

}  // namespace ddp
