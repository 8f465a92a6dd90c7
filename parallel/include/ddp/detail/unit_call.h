#pragma once

// Not a public header: one call of a sharded unit's forward.

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/Type.h>
#include <ddp/export.h>
#include <ddp/move_tensors.h>
#include <ddp/output_tensors.h>

namespace ddp {

class FullyShardedBase;

namespace detail {

/// Passes an argument to the module's forward with its value category: the argument itself, or, if
/// it holds tensors, a copy with others in their place.
template <typename T>
class ReplacedArgument {
 public:
  explicit ReplacedArgument(T argument) : argument_(static_cast<T>(argument)) {}

  void replace(const TensorMove& move) {
    if constexpr (can_move<Value>) moved_ = moved_by(move, static_cast<const Value&>(argument_));
  }
  /// Call it once: it moves from rvalues.
  T get() {
    if constexpr (can_move<Value>) {
      if (moved_) return static_cast<T>(*moved_);
    }
    return static_cast<T>(argument_);
  }

 private:
  using Value = std::decay_t<T>;
  struct Nothing {};

  T argument_;  // a reference
  std::conditional_t<can_move<Value>, std::optional<Value>, Nothing> moved_;
};

/// From the gather before a unit's forward to the moment when its outputs are in the graph. Without
/// leave(), because forward threw, its end frees the unit.
class DDP_API UnitCall {
 public:
  explicit UnitCall(FullyShardedBase& unit);
  ~UnitCall();
  C10_DISABLE_COPY_AND_ASSIGN(UnitCall);

  /// Runs `body`, the call, and adds to its error whose forward threw.
  template <typename Body>
  auto run(const Body& body) {
    try {
      return body();
    } catch (...) {
      note_error();
      throw;
    }
  }

  /// \param replace_all  calls its argument for all tensors among the arguments, in a fixed order.
  void enter(c10::function_ref<void(const TensorMove&)> replace_all);

  /// Runs forward, and returns its result.
  template <typename Forward>
  auto leave(const Forward& forward) {
    using Result = std::decay_t<decltype(forward())>;
    if constexpr (std::is_void_v<Result>) {
      forward();
      leave_with([](const TensorMove&) {});
    } else {
      Result result = forward();
      if constexpr (can_move<Result>) {
        std::optional<Result> replaced;
        leave_with([&](const TensorMove& move) { replaced.emplace(moved_by(move, result)); });
        return Result(std::move(*replaced));
      } else {
        bool holds_tensors = false;
        const bool understood =
            for_each_tensor(result, [&](const at::Tensor&) { holds_tensors = true; });
        check_result(understood && !holds_tensors, c10::demangle_type<Result>());
        leave_with([](const TensorMove&) {});
        return result;
      }
    }
  }

 private:
  struct State;
  using ReplaceAll = c10::function_ref<void(const TensorMove&)>;

  void leave_with(ReplaceAll replace_all);
  void note_error();  // in a handler
  static void check_result(bool has_no_tensors, const std::string& type);

  std::unique_ptr<State> state_;
};

}  // namespace detail
}  // namespace ddp
