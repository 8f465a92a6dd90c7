#pragma once

#include <ddp/export.h>

// Not a public header: the part of checkpoint() that does not depend on the function's type.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/nn/module.h>

namespace ddp {

namespace detail {

/// A call of a function that backward repeats.
struct DDP_API RepeatableCall {
  /// Calls the function with `inputs` in place of the tensors among its arguments, and returns the
  /// tensors of its result.
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)> run;
  /// The tensors among the arguments.
  std::vector<at::Tensor> inputs;
  /// Other tensors that require gradients and that the result depends on.
  std::vector<at::Tensor> parameters;
  std::vector<std::string> names;  // for errors
  /// Tensors that the function may read and write, and their names for errors.
  std::vector<at::Tensor> buffers;
  std::vector<std::string> buffer_names;
  /// Tensors that it writes and does not read: running statistics.
  std::vector<at::Tensor> statistics;
  bool preserve_rng_state = true;
  bool determinism_check = true;

  /// Takes the parameters and buffers of a module.
  void take_from(const torch::nn::Module& module);
  /// Takes single tensors as parameters.
  void take_from(const std::vector<at::Tensor>& parameters);
  /// Whether a backward pass may reach this call.
  bool needs_gradients() const;
};

/// One call, and the node that takes the place of its graph and builds it again in backward. While
/// it exists, the call has a number, which it has again in backward: what runs in it finds its
/// place by that.
///
/// Threads: belongs to the thread of the forward until connect(), then to that of the backward.
class DDP_API Recomputation {
 public:
  /// Records random numbers, autocast and buffers as they are now: construct it before the call.
  explicit Recomputation(RepeatableCall call);
  ~Recomputation();

  /// Moves the tensors of the result from the call's graph to the node, after the call.
  /// \throws c10::Error  the call changed an argument or a parameter, or running statistics that it
  ///         does not name.
  void connect(const std::vector<at::Tensor>& outputs);

 private:
  class Node;
  struct Scopes;

  std::unique_ptr<Scopes> scopes_;
  decltype(torch::autograd::Edge::function) node_;  // a Node
};

/// Call it before statistics of a normalization are moved.
/// \throws c10::Error  a call that runs on this thread does not name them.
void check_statistics_are_named(const std::vector<at::Tensor>& statistics);

/// \throws c10::Error  the tensors of a result of this type cannot be found.
DDP_API void check_result_understood(bool understood, const std::string& type);

}  // namespace detail
}  // namespace ddp
