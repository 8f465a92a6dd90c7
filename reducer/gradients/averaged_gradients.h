// The gradients in `.grad` that are averages of earlier passes, and those that no pass has
// averaged.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/reducer.h>
#include <ddp/internal/value_sample.h>

namespace ddp {

/// The averages of earlier passes that `.grad` still holds, kept out of the next reduced pass,
/// which would reduce them again.
///
/// A reduced pass sets them aside before its first gradient is added to `.grad`, and adds them to
/// its own averages. A pass that is not reduced adds its gradients to them in `.grad`, and a copy
/// tells later what of `.grad` was reduced. What a program does to `.grad` in place between passes
/// is done to the averages; a tensor that it puts there is this rank's own gradient.
///
/// Threads: one per parameter at a time.
class AveragedGradients {
 public:
  /// \param parameters  they outlive this.
  /// \param as_views  `.grad` lies in a bucket, whose memory the next pass needs.
  AveragedGradients(const std::vector<NamedParameter>& parameters, bool as_views)
      : parameters_(parameters), as_views_(as_views), slots_(parameters.size()) {}

  /// Whether `.grad` of a parameter may hold an average; false: the calls below do nothing.
  bool may_hold(size_t parameter) const { return slots_[parameter].state != State::None; }
  /// Whether `.grad` of any parameter holds an average that is not zero.
  ///
  /// Cost: a look at every parameter, and at all elements of those that a program changed.
  bool any() const;

  /// Called before a gradient is added to `.grad`, and in a reduced pass before `.grad` is packed.
  ///
  /// \return false where a program changed, in place and not to zeros, the sum of an average and of
  ///         gradients that were not reduced. All of it then counts as not reduced.
  bool before_gradient(size_t parameter, bool is_reduced);
  /// Called when a pass that is not reduced has added a gradient.
  void after_local_gradient(size_t parameter);
  /// Called when `.grad` is the average of a reduced pass, or, where no rank used the parameter, as
  /// it was packed: adds what was set aside.
  void add_back(size_t parameter, bool is_used);

  /// Runs `change`, which puts other tensors of the same values into `.grad`.
  void keep_through(const std::function<void()>& change);
  /// Counts what `.grad` holds as not reduced. What a pass that failed has set aside comes back.
  void forget();
  /// Takes the averages out of sums with gradients that were not reduced, and forgets them.
  void drop();

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  enum class State : uint8_t {
    None,      // `.grad` holds none
    Whole,     // `.grad` is one
    Part,      // `.grad` is the sum of `average` and of gradients that were not reduced
    SetAside,  // a reduced pass runs: `average` is not in `.grad`
  };
  struct Slot {
    State state = State::None;
    WeakTensor grad{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
    int64_t version = 0;  // of `grad` when it was last seen
    at::Tensor average;
  };

  at::Tensor& grad_of(size_t parameter) const;
  bool is_in_grad(size_t parameter) const;
  void see(size_t parameter, State state);
  void set_aside(size_t parameter);

  const std::vector<NamedParameter>& parameters_;
  const bool as_views_;
  std::vector<Slot> slots_;  // by parameter
};

/// Detects optimizer steps on gradients that came from the module without its wrapper's forward,
/// and so are not averaged.
///
/// Such a gradient alone is no error: the program may zero it before any step. Where the parameter
/// has changed by the time the next gradient comes, averaged or not, an optimizer used it.
///
/// Threads: note() on autograd's, one per parameter at a time; find_used() and clear() on one.
class UnaveragedGradients {
 public:
  explicit UnaveragedGradients(size_t parameters) : samples_(parameters) {}

  /// Records an unaveraged gradient of `parameter`.
  ///
  /// \return whether an optimizer used an earlier one, and no call has reported it yet.
  bool note(size_t parameter, const at::Tensor& tensor) {
    const auto before = std::exchange(samples_[parameter], value_sample(tensor));
    any_.store(true, std::memory_order_relaxed);
    return before && before != samples_[parameter] && !reported_.exchange(true);
  }

  /// Called when a reduced pass begins.
  ///
  /// \return a parameter whose unaveraged gradient an optimizer used; none when a call has reported
  ///         one already.
  std::optional<size_t> find_used(const std::vector<NamedParameter>& parameters) {
    if (!any_.load(std::memory_order_relaxed) || reported_) return {};
    for (size_t i = 0; i < samples_.size(); ++i) {
      if (!samples_[i] || samples_[i] == value_sample(parameters[i].tensor)) continue;
      reported_ = true;
      return i;
    }
    return {};
  }

  /// Called after a reduced pass.
  void clear() {
    if (any_.exchange(false)) std::fill(samples_.begin(), samples_.end(), std::nullopt);
  }

 private:
  // By parameter, value_sample() of it at its last unaveraged gradient.
  std::vector<std::optional<uint64_t>> samples_;
  std::atomic<bool> any_{false};
  std::atomic<bool> reported_{false};
};

}  // namespace ddp
