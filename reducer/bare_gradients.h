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

/// Notices optimizer steps on gradients that came from the bare module, past the wrapper's forward,
/// and so are not averaged.
///
/// Such a gradient alone is no sign: it may only have passed through, to be zeroed. Where the
/// parameter has changed when the next gradient comes, averaged or not, it was used.
///
/// Threads: note() on autograd's, one per parameter at a time; used() and clear() on one.
class BareGradients {
 public:
  explicit BareGradients(size_t parameters) : samples_(parameters) {}

  /// Such a gradient of `parameter` is there.
  ///
  /// \return whether it is the first sign that one was used.
  bool note(size_t parameter, const at::Tensor& tensor) {
    const auto before = std::exchange(samples_[parameter], value_sample(tensor));
    any_.store(true, std::memory_order_relaxed);
    return before && before != samples_[parameter] && !told_.exchange(true);
  }

  /// A pass begins whose gradients are averaged.
  ///
  /// \return a parameter of which there is the first sign that one was used.
  std::optional<size_t> used(const std::vector<NamedParameter>& parameters) {
    if (!any_.load(std::memory_order_relaxed) || told_) return {};
    for (size_t i = 0; i < samples_.size(); ++i) {
      if (!samples_[i] || samples_[i] == value_sample(parameters[i].tensor)) continue;
      told_ = true;
      return i;
    }
    return {};
  }

  /// Gradients were averaged.
  void clear() {
    if (any_.exchange(false)) std::fill(samples_.begin(), samples_.end(), std::nullopt);
  }

 private:
  // By parameter, its value when its last bare gradient came.
  std::vector<std::optional<uint64_t>> samples_;
  std::atomic<bool> any_{false};
  std::atomic<bool> told_{false};
};

}  // namespace ddp
