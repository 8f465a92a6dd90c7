#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/autograd_node.h>
#include <torch/csrc/autograd/function.h>

namespace ddp {

/// The nodes of autograd's graph that made the outputs of the forward passes since the last reduced
/// backward pass. Keeps no graph alive.
///
/// Threads: one at a time.
class ForwardOutputs {
 public:
  using Node = torch::autograd::Node;

  void clear();

  /// \param complete  whether `outputs` are all tensors that the forward pass returned.
  /// \return the nodes of these outputs.
  std::vector<Node*> add(const std::vector<at::Tensor>& outputs, bool complete);

  /// Whether every backward pass through a forward passes a node that made one of its outputs:
  /// false when some outputs are unknown, or are parameters.
  bool are_complete() const { return complete_; }

  /// Whether the backward pass that the calling thread runs goes through one of the nodes.
  bool are_in_backward() const;

  /// The nodes; empty when they are not complete, or one of them no longer exists.
  std::vector<NodePtr> nodes() const;

 private:
  bool complete_ = true;
  std::vector<WeakNodePtr> nodes_;
};

}  // namespace ddp
