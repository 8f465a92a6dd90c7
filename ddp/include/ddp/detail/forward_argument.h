#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>

#include <ATen/core/Tensor.h>
#include <ddp/move_tensors.h>
#include <ddp/output_tensors.h>

namespace ddp {
namespace detail {

/// Passes an argument to the module's `forward` with its value category: the argument itself, or,
/// if it holds tensors, a copy on the module's device and in its precision.
template <typename T>
class ForwardArgument {
 public:
  ForwardArgument(T argument, const InputPlacement& placement)
      : argument_(static_cast<T>(argument)), placement_(placement) {}

  const std::remove_reference_t<T>& value() const { return argument_; }

  /// Call it once: it moves from rvalues.
  T get() {
    if constexpr (can_move<Value>) {
      if (placement_.changes_inputs()) {
        moved_ = placement_.placed(static_cast<const Value&>(argument_));
        return static_cast<T>(*moved_);
      }
    }
    return static_cast<T>(argument_);
  }

 private:
  using Value = std::decay_t<T>;
  struct Nothing {};

  T argument_;  // a reference
  const InputPlacement& placement_;
  std::conditional_t<can_move<Value>, std::optional<Value>, Nothing> moved_;
};

/// How many samples a batch has: the size of the first dimension of the first tensor among the
/// arguments, or in a container that is the first argument.
template <typename... Arguments>
std::optional<int64_t> rows_of_first_tensor(const Arguments&... arguments) {
  std::optional<int64_t> rows;
  const TensorSink sink = [&](const at::Tensor& t) {
    if (!rows && t.defined() && t.dim() > 0) rows = t.size(0);
  };
  (for_each_tensor(arguments, sink), ...);
  return rows;
}

}  // namespace detail

}  // namespace ddp
