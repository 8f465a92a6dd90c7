#pragma once

#include <array>
#include <cstddef>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp::detail {

/// The arguments of a forward pass, which another rank can read: tensors, and the bytes of the
/// rest.
struct CallArguments {
  std::vector<at::Tensor> tensors = {};
  std::string bytes = {};
  size_t next_tensor = 0;
  size_t next_byte = 0;

  void write_bytes(const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
  }
  void read_bytes(void* data, size_t size) {
    std::memcpy(data, bytes.data() + next_byte, size);
    next_byte += size;
  }
  void write_size(size_t size) { write_bytes(&size, sizeof size); }
  size_t read_size() {
    size_t size = 0;
    read_bytes(&size, sizeof size);
    return size;
  }
};

/// Makes the tensors of the outputs of a call with given arguments.
using RepeatCall = std::function<std::vector<at::Tensor>(CallArguments&)>;

/// Writes and reads an argument. The general case is a type that only its program knows.
template <typename T, typename = void>
struct CallPart {
  static constexpr bool is_known = false;
};

template <typename T>
constexpr bool can_repeat = CallPart<T>::is_known;

template <>
struct CallPart<at::Tensor> {
  static constexpr bool is_known = true;
  static void write(CallArguments& to, const at::Tensor& value) { to.tensors.push_back(value); }
  static at::Tensor read(CallArguments& from) { return from.tensors.at(from.next_tensor++); }
};

template <typename T>
struct CallPart<T, std::enable_if_t<std::is_arithmetic_v<T> || std::is_enum_v<T>>> {
  static constexpr bool is_known = true;
  static void write(CallArguments& to, const T& value) { to.write_bytes(&value, sizeof value); }
  static T read(CallArguments& from) {
    T value{};
    from.read_bytes(&value, sizeof value);
    return value;
  }
};

template <>
struct CallPart<std::string> {
  static constexpr bool is_known = true;
  static void write(CallArguments& to, const std::string& value) {
    to.write_size(value.size());
    to.write_bytes(value.data(), value.size());
  }
  static std::string read(CallArguments& from) {
    std::string value(from.read_size(), '\0');
    from.read_bytes(value.data(), value.size());
    return value;
  }
};

template <typename T>
struct CallPart<std::optional<T>, std::enable_if_t<can_repeat<T>>> {
  static constexpr bool is_known = true;
  static void write(CallArguments& to, const std::optional<T>& value) {
    to.write_size(value ? 1 : 0);
    if (value) CallPart<T>::write(to, *value);
  }
  static std::optional<T> read(CallArguments& from) {
    if (from.read_size() == 0) return std::nullopt;
    return CallPart<T>::read(from);
  }
};

template <typename T>
struct CallPart<std::vector<T>, std::enable_if_t<can_repeat<T>>> {
  static constexpr bool is_known = true;
  static void write(CallArguments& to, const std::vector<T>& values) {
    to.write_size(values.size());
    for (const T& value : values) CallPart<T>::write(to, value);
  }
  static std::vector<T> read(CallArguments& from) {
    std::vector<T> values;
    for (size_t left = from.read_size(); left > 0; --left) {
      values.push_back(CallPart<T>::read(from));
    }
    return values;
  }
};

/// Arrays, pairs and tuples.
template <typename Product, typename... Parts>
struct ProductPart {
  static constexpr bool is_known = true;
  static void write(CallArguments& to, const Product& value) {
    std::apply([&](const auto&... parts) { (CallPart<Parts>::write(to, parts), ...); }, value);
  }
  static Product read(CallArguments& from) { return Product{CallPart<Parts>::read(from)...}; }
};
template <typename A, typename B>
struct CallPart<std::pair<A, B>, std::enable_if_t<can_repeat<A> && can_repeat<B>>>
    : ProductPart<std::pair<A, B>, A, B> {};
template <typename... Parts>
struct CallPart<std::tuple<Parts...>, std::enable_if_t<(can_repeat<Parts> && ...)>>
    : ProductPart<std::tuple<Parts...>, Parts...> {};

template <typename T, size_t n>
struct CallPart<std::array<T, n>, std::enable_if_t<can_repeat<T>>> {
  static constexpr bool is_known = true;
  static void write(CallArguments& to, const std::array<T, n>& values) {
    for (const T& value : values) CallPart<T>::write(to, value);
  }
  static std::array<T, n> read(CallArguments& from) {
    std::array<T, n> values{};
    for (T& value : values) value = CallPart<T>::read(from);
    return values;
  }
};

/// Not of an unordered map: its order on another rank may be another one.
template <typename Key, typename T>
struct CallPart<std::map<Key, T>, std::enable_if_t<can_repeat<Key> && can_repeat<T>>> {
  static constexpr bool is_known = true;
  static void write(CallArguments& to, const std::map<Key, T>& values) {
    to.write_size(values.size());
    for (const auto& [key, value] : values) {
      CallPart<Key>::write(to, key);
      CallPart<T>::write(to, value);
    }
  }
  static std::map<Key, T> read(CallArguments& from) {
    std::map<Key, T> values;
    for (size_t left = from.read_size(); left > 0; --left) {
      auto key = CallPart<Key>::read(from);
      values.emplace(std::move(key), CallPart<T>::read(from));
    }
    return values;
  }
};

}  // namespace ddp::detail
