#pragma once

#include <string>
#include <unordered_set>
#include <vector>

#include <c10/util/FunctionRef.h>
#include <ddp/process_group.h>
#include <ddp/reducer.h>
#include <torch/nn/module.h>

namespace ddp {

/// A named tensor of a module, and whether it is a parameter or a buffer.
struct StateTensor {
  std::string name;
  at::Tensor tensor;
  bool is_parameter = true;
};

using Names = std::unordered_set<std::string>;

/// All parameters, then all buffers, but for the ignored names; each tensor once, under the name
/// that a pre-order walk meets first.
std::vector<StateTensor> module_state(const torch::nn::Module& module, const Names& ignored);

/// Finds a module's buffers again and again, cheaply: modules may assign new ones at any time.
class BufferFinder {
 public:
  BufferFinder(const torch::nn::Module& module, const Names& ignored);

  /// The buffers there are now, each once, in pre-order, but for the ignored names.
  std::vector<at::Tensor> find() const;

 private:
  struct Owner {
    std::shared_ptr<const torch::nn::Module> module;
    std::string prefix;  // of its buffers' full names
  };
  std::vector<Owner> owners_;  // all submodules; the module itself is not kept alive
  const torch::nn::Module& root_;
  Names ignored_;
};

/// The parameters whose gradients are averaged: those that require one, but for the ignored
/// names, in pre-order and registration order. A parameter that an Embedding or EmbeddingBag with
/// `sparse=true` owns is marked as sparse.
std::vector<NamedParameter> trained_parameters(
    const torch::nn::Module& module, const Names& ignored);

/// The parameters that do not require a gradient, but for the ignored names.
std::vector<NamedParameter> frozen_parameters(
    const torch::nn::Module& module, const Names& ignored);

/// Overwrites the tensors with rank `source`'s, in messages of about 250 MiB. Autograd does not see
/// it: versions stay, so a graph that was recorded before can still run backward.
///
/// \param wait  what to wait for each message with.
///
/// Collective: yes, when there are tensors; the same ones on every rank. Blocks: host, or stream.
void broadcast_from(
    int source, const std::vector<at::Tensor>& tensors, const ProcessGroup& group,
    c10::function_ref<void(c10d::Work&)> wait);

}  // namespace ddp
