#pragma once

#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/reducer.h>
#include <ddp/process_group.h>
#include <torch/nn/module.h>

namespace ddp {

/// A named tensor of a module, and whether it is a parameter or a buffer.
struct StateTensor {
  std::string name;
  at::Tensor tensor;
  bool is_parameter = true;
};

using Names = std::unordered_set<std::string>;

/// All parameters, then all buffers, without the ignored names; each tensor once, under its first
/// name in pre-order.
std::vector<StateTensor> module_state(const torch::nn::Module& module, const Names& ignored);

/// Finds repeated tensors: a shared tensor has several names.
class SeenTensors {
 public:
  /// Whether `t` is added for the first time.
  bool add(const at::Tensor& t) { return seen_.insert(t.unsafeGetTensorImpl()).second; }

 private:
  std::unordered_set<const void*> seen_;
};

/// Whether a module within `module` communicates in its backward, over `group`: a SyncBatchNorm.
bool has_collectives_over(const torch::nn::Module& module, const ProcessGroup& group);

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

  /// The parameters whose gradients are averaged: those of the module that require one, in
  /// pre-order and registration order, then the tensors outside. A parameter that an Embedding or
  /// EmbeddingBag with `sparse=true` owns is marked as sparse.
  std::vector<NamedParameter> trained() const;
  /// All parameters, then all buffers, then the tensors outside.
  std::vector<StateTensor> state(bool with_buffers = true) const;
  void zero_grad(bool set_to_none) const;

  void remember_frozen() { frozen_ = parameters_that(/*require_gradient=*/false); }
  const std::vector<NamedParameter>& frozen() const { return frozen_; }
  /// The names of those that require one since.
  std::vector<std::string> unfrozen() const;

  /// Why the module no longer gives the parameters `which` of `trained` a gradient.
  std::vector<MissingGradient> explain_missing(
      const std::vector<NamedParameter>& trained, const std::vector<size_t>& which) const;

 private:
  std::vector<NamedParameter> parameters_that(bool require_gradient) const;

  const std::shared_ptr<torch::nn::Module> module_;
  const Names ignored_;
  std::vector<at::Tensor> outside_;
  std::vector<NamedParameter> frozen_;
};

}  // namespace ddp
