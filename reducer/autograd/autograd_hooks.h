#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <ddp/internal/autograd_node.h>
#include <ddp/internal/reducer.h>
#include <torch/csrc/autograd/function_hook.h>

namespace ddp {

/// The events of a backward pass that a reducer handles. Called on autograd's threads, one per
/// device.
class AutogradEvents {
 public:
  /// A backward pass through a watched output begins.
  virtual void on_output() = 0;
  /// A gradient is about to be accumulated in the `.grad` of a parameter.
  virtual void before_gradient(size_t parameter) = 0;
  /// The gradient of a parameter was accumulated.
  virtual void on_gradient(size_t parameter, bool defined) = 0;
  /// Autograd has finished a pass whose end is watched. A nested pass calls it for its own end.
  virtual void on_backward_done() = 0;
  /// A pass whose end is watched ended in an exception.
  virtual void on_backward_failed(int64_t pass, const std::exception_ptr& cause) noexcept = 0;

 protected:
  ~AutogradEvents() = default;
};

/// The gradient with which autograd calls the hooks of a parameter on this thread, and which it
/// holds beside `.grad` until they return; null while the thread runs no such hook.
const at::Tensor* incoming_gradient();

/// The hooks that a reducer has in autograd: on each parameter's gradient accumulator, on the nodes
/// that made the outputs of forward passes, and at the end of a backward pass. The destructor
/// removes those on accumulators; after it the others do nothing.
class AutogradHooks {
 public:
  /// Parameters whose data was exchanged by data of another shape (set_data) get new accumulators.
  ///
  /// \param parameters  they outlive this.
  AutogradHooks(const std::vector<NamedParameter>& parameters, AutogradEvents& events);
  ~AutogradHooks();
  C10_DISABLE_COPY_AND_ASSIGN(AutogradHooks);

  /// By parameter. A parameter holds its accumulator only weakly.
  const std::vector<NodePtr>& accumulators() const { return accumulators_; }

  /// Autograd gives a parameter a new accumulator when its data is exchanged (torch::load, `to`):
  /// moves the hooks to new accumulators, where dtype and device have not changed.
  ///
  /// \return whether any hook moved.
  /// Cost: a few nanoseconds a parameter.
  bool refresh();

  /// A parameter whose shape has changed since construction: autograd refuses its gradients.
  ///
  /// Cost: a few nanoseconds a parameter.
  std::optional<size_t> reshaped() const;

  /// Makes a backward pass through one of `outputs` call on_output() first: in the outermost pass,
  /// although all parameters may get their gradients in passes nested in it.
  void watch_outputs(const std::vector<at::Tensor>& outputs);

  /// Whether the backward pass that the calling thread runs accumulates gradients of these
  /// parameters: torch::autograd::grad does not.
  bool accumulates() const;

  /// Makes the end of the backward pass that the calling thread runs call on_backward_done() or
  /// on_backward_failed().
  ///
  /// \return false when the end of this pass was watched already.
  bool watch_end(int64_t pass);

 private:
  friend bool is_averaged(const torch::autograd::Node& accumulator);
  class BeforeGradientHook;
  class GradientHook;
  class OutputHook;

  using Events = std::shared_ptr<AutogradEvents*>;

  struct Hooked {
    uintptr_t after;                                 // the key of the GradientHook
    const torch::autograd::FunctionPreHook* before;  // which the accumulator owns
  };

  Hooked hook(size_t parameter);
  void unhook(size_t parameter);

  const std::vector<NamedParameter>& parameters_;
  const Events events_;  // shared with hooks on nodes that may outlive this; null after destruction
  std::vector<NodePtr> accumulators_;
  std::vector<Hooked> hooked_;         // by parameter
  std::vector<at::DimVector> shapes_;  // at construction, by parameter
  std::atomic<bool> end_is_watched_{false};
};

}  // namespace ddp
