#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>
#include <ddp/export.h>
#include <ddp/output_tensors.h>

namespace ddp {

/// Returns the moved tensor for a tensor; an undefined one stays undefined.
using TensorMove = c10::function_ref<at::Tensor(const at::Tensor&)>;

namespace detail {

template <typename T>
using MoveTensors =
    decltype(move_tensors(std::declval<const T&>(), std::declval<const TensorMove&>()));

/// Copies a `T` that holds tensors to another device. The general case is a type without tensors,
/// or a user's type with a function declared beside it:
/// ```
/// MyBatch move_tensors(const MyBatch& batch, const ddp::TensorMove& to) {
///   return {to(batch.images), to(batch.labels), batch.names};
/// }
/// ```
template <typename T>
struct Mover {
  static constexpr bool holds_tensors = has<MoveTensors, T>;
  static T move(const TensorMove& to, const T& value) { return move_tensors(value, to); }
};

/// Whether `T` holds tensors that can be moved.
template <typename T>
constexpr bool can_move = Mover<T>::holds_tensors;

/// A copy of `value` in which `to` has replaced the tensors; parts without tensors are copied
/// unchanged.
template <typename T>
T moved_by(const TensorMove& to, const T& value) {
  if constexpr (can_move<T>) {
    return Mover<T>::move(to, value);
  } else {
    return value;
  }
}

/// The device and the dtype (of floating tensors) that tensors get; unset: they keep their own.
struct InputPlacement {
  std::optional<c10::Device> device;
  std::optional<at::ScalarType> floating_dtype;

  bool changes_inputs() const { return device || floating_dtype; }

  /// A copy of `value` with its tensors there and in that dtype; a tensor that already is so is not
  /// copied.
  template <typename T>
  T placed(const T& value) const {
    const auto place = [this](const at::Tensor& t) { return t.defined() ? placed_tensor(t) : t; };
    return moved_by(place, value);
  }

 private:
  /// From the host to a GPU through pinned memory: the host does not wait for the GPU, which copies
  /// in the order of its current stream.
  DDP_API at::Tensor placed_tensor(const at::Tensor& t) const;
};

template <>
struct Mover<at::Tensor> {
  static constexpr bool holds_tensors = true;
  static at::Tensor move(const TensorMove& to, const at::Tensor& t) { return to(t); }
};

/// Tensors, lists, tuples and dicts of them; others are copied as they are.
template <>
struct Mover<c10::IValue> {
  static constexpr bool holds_tensors = true;
  DDP_API static c10::IValue move(const TensorMove& to, const c10::IValue& value);
};

template <typename T>
struct Mover<std::optional<T>> {
  static constexpr bool holds_tensors = can_move<T>;
  static std::optional<T> move(const TensorMove& to, const std::optional<T>& value) {
    return value ? std::optional<T>(moved_by(to, *value)) : std::nullopt;
  }
};

template <typename T>
struct Mover<std::vector<T>> {
  static constexpr bool holds_tensors = can_move<T>;
  static std::vector<T> move(const TensorMove& to, const std::vector<T>& values) {
    std::vector<T> moved;
    moved.reserve(values.size());
    for (const auto& value : values) moved.push_back(moved_by(to, value));
    return moved;
  }
};

/// Arrays, pairs and tuples.
template <typename Product, typename... Parts>
struct ProductMover {
  static constexpr bool holds_tensors =
      (can_move<Parts> || ...) && (std::is_copy_constructible_v<Parts> && ...);
  static Product move(const TensorMove& to, const Product& value) {
    return std::apply([&](const auto&... parts) { return Product{moved_by(to, parts)...}; }, value);
  }
};
template <typename A, typename B>
struct Mover<std::pair<A, B>> : ProductMover<std::pair<A, B>, A, B> {};
template <typename... Parts>
struct Mover<std::tuple<Parts...>> : ProductMover<std::tuple<Parts...>, Parts...> {};
template <typename T, size_t n>
struct Mover<std::array<T, n>> : ProductMover<std::array<T, n>, T> {};

template <typename Map>
struct MapMover {
  static constexpr bool holds_tensors = can_move<typename Map::mapped_type>;
  static Map move(const TensorMove& to, const Map& values) {
    Map moved;
    for (const auto& [key, value] : values) moved.emplace(key, moved_by(to, value));
    return moved;
  }
};
template <typename... T>
struct Mover<std::map<T...>> : MapMover<std::map<T...>> {};
template <typename... T>
struct Mover<std::unordered_map<T...>> : MapMover<std::unordered_map<T...>> {};

}  // namespace detail
}  // namespace ddp
