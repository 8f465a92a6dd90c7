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

namespace ddp {

/// What autograd tells a reducer. Called on autograd's threads, one per device.
class AutogradEvents {
 public:
  /// A backward pass through an output that was watched begins.
  virtual void on_output() = 0;
  /// The gradient of a parameter was accumulated.
  virtual void on_gradient(size_t parameter, bool defined) = 0;
  /// Autograd's work is done in a pass whose end was watched; of a nested pass, its own work.
  virtual void on_backward_done() = 0;
  /// A pass whose end was watched ended in an exception.
  virtual void on_backward_failed(int64_t pass, const std::exception_ptr& cause) noexcept = 0;

 protected:
  ~AutogradEvents() = default;
};

/// The gradient that hooks on a parameter are called with, which autograd holds beside `.grad`
/// until they return; null where the calling thread runs none.
const at::Tensor* incoming_gradient();

/// The hooks that a reducer has in autograd: on each parameter's gradient accumulator, on the nodes
/// that made the outputs of forward passes, and at the end of a backward pass. The destructor
/// removes the first, and the others do nothing from then on.
class AutogradHooks {
 public:
  /// Parameters whose data was exchanged by data of another shape (set_data) get new accumulators.
  ///
  /// \param parameters  they outlive this.
  AutogradHooks(const std::vector<NamedParameter>& parameters, AutogradEvents& events);
  ~AutogradHooks();
  AutogradHooks(const AutogradHooks&) = delete;
  AutogradHooks& operator=(const AutogradHooks&) = delete;

  /// By parameter. The parameter itself holds its own only weakly.
  const std::vector<NodePtr>& accumulators() const { return accumulators_; }

  /// Autograd gives a parameter a new accumulator when its data is exchanged (torch::load, `to`):
  /// hooks those, where the dtype and the device are what they were.
  ///
  /// \return whether there were any.
  /// Cost: a few nanoseconds a parameter.
  bool follow();

  /// A parameter that has another shape than at construction, whose gradients autograd refuses.
  ///
  /// Cost: a few nanoseconds a parameter.
  std::optional<size_t> reshaped() const;

  /// Whether any object of this class has a hook there.
  static bool has_hook_on(const torch::autograd::Node& accumulator);

  /// The first thing that a backward pass through one of `outputs` does is to say on_output(): in
  /// the outermost pass, although parameters may all get their gradients in passes nested in it.
  void watch_outputs(const std::vector<at::Tensor>& outputs);

  /// Whether the backward pass that the calling thread runs accumulates gradients of these
  /// parameters: torch::autograd::grad does not.
  bool accumulates() const;

  /// Asks for the end of the backward pass that the calling thread runs.
  ///
  /// \return whether nobody had asked yet.
  bool watch_end(int64_t pass);

 private:
  class GradientHook;
  class OutputHook;
  class Abandonment;

  using Events = std::shared_ptr<AutogradEvents*>;

  uintptr_t hook(size_t parameter);

  const std::vector<NamedParameter>& parameters_;
  const Events events_;  // for hooks on nodes that may outlive this; emptied at the end
  std::vector<NodePtr> accumulators_;
  std::vector<uintptr_t> keys_;        // of the hooks, by parameter
  std::vector<at::DimVector> shapes_;  // at construction, by parameter
  std::atomic<bool> end_is_watched_{false};
};

}  // namespace ddp
