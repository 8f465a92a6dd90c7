#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/reducer.h>
#include <ddp/internal/value_sample.h>

namespace ddp {

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
