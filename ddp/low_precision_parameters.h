#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace ddp {

/// Parameters that are their own casts to a low precision while forward and backward passes use
/// them, and what they were at any other time.
///
/// The tensors stay the same, wherever modules and optimizers hold them: they get the data of the
/// cast and its place in the graph, so that autograd leads from there to the parameters. Autograd
/// saves for backward the tensors, not their data; so they become the casts of that forward pass
/// again when a backward pass reaches what it returned. Each is itself again before its gradient
/// accumulates, and all are when the backward pass ends, or fails.
///
/// Python's wrapper exchanges the data alone, and parameters stay in low precision from forward to
/// the end of the averaged backward pass, if one comes.
///
/// Memory: the casts, as long as the outputs of the forward pass live.
/// Threads: those that use the parameters in between see the casts.
class LowPrecisionParameters : public std::enable_shared_from_this<LowPrecisionParameters> {
 public:
  /// \param parameters  leaves, each once. Those that are not floating stay as they are.
  LowPrecisionParameters(const std::vector<at::Tensor>& parameters, at::ScalarType dtype);

  /// A forward pass begins. Nothing inside a backward pass, where they are in low precision.
  void begin_forward();
  /// It returned `outputs`.
  void end_forward(const std::vector<at::Tensor>& outputs);
  /// It threw, or what it returned has no graph.
  void abandon_forward() noexcept;

 private:
  /// Of one forward pass, as long as its outputs live; by parameter.
  using Casts = std::vector<at::Tensor>;
  using CastsPtr = std::shared_ptr<Casts>;
  class OutputHook;
  class GradientHook;
  class BackwardEnd;

  enum class Phase { Original, Forward, Backward };

  void begin_backward(const CastsPtr& casts);
  void end_backward() noexcept;
  void substitute(const Casts& casts);
  void restore(size_t parameter) noexcept;
  void restore_all() noexcept;
  void hook_accumulator(size_t parameter);

  const std::vector<at::Tensor> parameters_;
  const at::ScalarType dtype_;
  std::vector<at::Tensor> originals_;  // of those that are substituted; by parameter
  Phase phase_ = Phase::Original;
  CastsPtr casts_;  // of the forward pass that goes on
};

}  // namespace ddp
