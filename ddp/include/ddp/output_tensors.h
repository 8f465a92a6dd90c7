#pragma once

#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace ddp {

/// Receives the tensors that a value holds, one at a time.
using TensorSink = std::function<void(const at::Tensor&)>;

namespace detail {

template <typename T>
using VisitTensors =
    decltype(visit_tensors(std::declval<const T&>(), std::declval<const TensorSink&>()));
template <typename T>
using TupleSize = decltype(std::tuple_size<T>::value);
template <typename T>
using Range = decltype(*std::begin(std::declval<const T&>()), std::end(std::declval<const T&>()));
template <typename T>
using DictItem = decltype(std::declval<const T&>().key(), std::declval<const T&>().value());
template <typename T>
using Nullable = decltype(static_cast<bool>(std::declval<const T&>()), *std::declval<const T&>());

template <template <typename> class Trait, typename T, typename = void>
constexpr bool has = false;
template <template <typename> class Trait, typename T>
constexpr bool has<Trait, T, std::void_t<Trait<T>>> = true;

/// Whether what a `T` holds is again a `T`, as of a function (`*f` is `f`) and of a path.
template <typename T>
constexpr bool is_own_part() {
  if constexpr (has<Range, T>) {
    return std::is_same_v<std::decay_t<decltype(*std::begin(std::declval<const T&>()))>, T>;
  } else if constexpr (has<Nullable, T>) {
    using Held = std::remove_reference_t<decltype(*std::declval<const T&>())>;
    return std::is_function_v<Held> || std::is_same_v<std::decay_t<Held>, T>;
  } else {
    return false;
  }
}

template <typename T>
constexpr bool holds_no_tensor = std::is_arithmetic_v<T> || std::is_enum_v<T> ||
                                 std::is_convertible_v<const T&, std::string_view>;

}  // namespace detail

/// Gives `sink` every tensor in a value that a module's `forward` returned.
///
/// Looks into tensors, optionals, pointers, pairs, tuples, arrays, lists, maps, OrderedDict and
/// IValue, nested in any way. For a type of your own, declare beside it
/// ```
/// void visit_tensors(const MyOutput& output, const ddp::TensorSink& sink) {
///   sink(output.logits);
///   ddp::for_each_tensor(output.hidden_states, sink);
/// }
/// ```
/// \return whether every part of `value` was understood; false for a type that is none of these,
///         whose tensors, if it has any, were not seen.
template <typename T>
bool for_each_tensor(const T& value, const TensorSink& sink) {
  if constexpr (std::is_convertible_v<const T&, const at::Tensor&>) {
    sink(value);
    return true;
  } else if constexpr (detail::has<detail::VisitTensors, T>) {
    visit_tensors(value, sink);
    return true;
  } else if constexpr (std::is_same_v<T, c10::IValue>) {
    value.visit([&](const c10::IValue& part) {
      if (part.isTensor()) sink(part.toTensor());
      return false;  // visit all parts, also nested ones
    });
    return true;
  } else if constexpr (detail::holds_no_tensor<T>) {
    return true;
  } else if constexpr (detail::is_own_part<T>()) {
    return false;
  } else if constexpr (detail::has<detail::Range, T>) {
    bool understood = true;
    for (const auto& part : value) understood = for_each_tensor(part, sink) && understood;
    return understood;
  } else if constexpr (detail::has<detail::TupleSize, T>) {
    return std::apply(
        [&](const auto&... parts) {
          bool understood = true;
          ((understood = for_each_tensor(parts, sink) && understood), ...);
          return understood;
        },
        value);
  } else if constexpr (detail::has<detail::DictItem, T>) {
    return for_each_tensor(value.value(), sink);
  } else if constexpr (detail::has<detail::Nullable, T>) {
    return value ? for_each_tensor(*value, sink) : true;
  } else {
    return false;
  }
}

}  // namespace ddp
