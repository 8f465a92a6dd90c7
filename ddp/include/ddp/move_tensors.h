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

namespace ddp::detail {

/// How a `T` that holds tensors is copied to another device; the general case holds none.
template <typename T>
struct Mover {
  static constexpr bool holds_tensors = false;
};

/// Whether `moved_to` knows `T`, and `T` holds tensors.
template <typename T>
constexpr bool can_move = Mover<T>::holds_tensors;

/// A copy of `value` with its tensors on `device`; parts that hold none are copied as they are. A
/// tensor that is there already is not copied.
template <typename T>
T moved_to(c10::Device device, const T& value) {
  if constexpr (can_move<T>) {
    return Mover<T>::move(device, value);
  } else {
    return value;
  }
}

template <>
struct Mover<at::Tensor> {
  static constexpr bool holds_tensors = true;
  static at::Tensor move(c10::Device device, const at::Tensor& t) {
    return t.defined() ? t.to(device) : t;
  }
};

template <typename T>
struct Mover<std::optional<T>> {
  static constexpr bool holds_tensors = can_move<T>;
  static std::optional<T> move(c10::Device device, const std::optional<T>& value) {
    return value ? std::optional<T>(moved_to(device, *value)) : std::nullopt;
  }
};

template <typename T>
struct Mover<std::vector<T>> {
  static constexpr bool holds_tensors = can_move<T>;
  static std::vector<T> move(c10::Device device, const std::vector<T>& values) {
    std::vector<T> moved;
    moved.reserve(values.size());
    for (const auto& value : values) moved.push_back(moved_to(device, value));
    return moved;
  }
};

/// Arrays, pairs and tuples.
template <typename Product, typename... Parts>
struct ProductMover {
  static constexpr bool holds_tensors =
      (can_move<Parts> || ...) && (std::is_copy_constructible_v<Parts> && ...);
  static Product move(c10::Device device, const Product& value) {
    return std::apply(
        [&](const auto&... parts) { return Product{moved_to(device, parts)...}; }, value);
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
  static Map move(c10::Device device, const Map& values) {
    Map moved;
    for (const auto& [key, value] : values) moved.emplace(key, moved_to(device, value));
    return moved;
  }
};
template <typename... T>
struct Mover<std::map<T...>> : MapMover<std::map<T...>> {};
template <typename... T>
struct Mover<std::unordered_map<T...>> : MapMover<std::unordered_map<T...>> {};

}  // namespace ddp::detail
