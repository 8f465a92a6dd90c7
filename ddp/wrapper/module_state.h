#pragma once

#include <string>
#include <unordered_set>
#include <vector>

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

/// The result of BufferFinder.
struct FoundBuffers {
  std::vector<at::Tensor> tensors;
  /// The TensorImpls of a batch normalization's running statistics. In training mode autograd saves
  /// them and does not read them.
  std::unordered_set<const void*> running_statistics;
};

/// Finds a module's buffers anew in each call: modules may assign new ones, replace children and
/// register further ones at any time.
class BufferFinder {
 public:
  BufferFinder(const torch::nn::Module& module, const Names& ignored)
      : root_(module), ignored_(ignored) {}

  /// The module's buffers at the moment, each once, in pre-order, without the ignored names.
  ///
  /// Cost: a walk over all modules.
  FoundBuffers find() const;

 private:
  const torch::nn::Module& root_;
  const Names ignored_;
};

/// Whether a module within `module` communicates in its backward, over `group`: a SyncBatchNorm.
bool has_collectives_over(const torch::nn::Module& module, const ProcessGroup& group);

/// The parameters whose gradients are averaged: those that require one, without the ignored
/// names, in pre-order and registration order. A parameter that an Embedding or EmbeddingBag with
/// `sparse=true` owns is marked as sparse.
std::vector<NamedParameter> trained_parameters(
    const torch::nn::Module& module, const Names& ignored);

/// The parameters that do not require a gradient, without the ignored names.
std::vector<NamedParameter> frozen_parameters(
    const torch::nn::Module& module, const Names& ignored);

}  // namespace ddp
