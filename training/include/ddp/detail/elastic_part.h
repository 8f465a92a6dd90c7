#pragma once

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include <ddp/detail/checkpoint_part.h>
#include <ddp/grad_scaler.h>
#include <ddp/process_group.h>

namespace ddp::detail {

/// What Elastic does with a part beside moving its state.
struct ElasticHooks {
  /// Follows the ranks of another group; empty: the part has no group.
  std::function<void(const ProcessGroup&)> rebind = {};
  /// Returns a function that takes the part back to its present state; empty: its whole state is
  /// copied.
  std::function<std::function<void()>()> bookmark = {};
  /// Whether rebind() compares where the ranks are, which may differ a little: a sampler.
  bool compares_itself = false;
};

template <typename T, typename = void>
struct HasRebind : std::false_type {};
template <typename T>
struct HasRebind<
    T, std::void_t<decltype(std::declval<T&>().rebind(std::declval<const ProcessGroup&>()))>>
    : std::true_type {};

template <typename T, typename = void>
struct HasBookmark : std::false_type {};
template <typename T>
struct HasBookmark<T, std::void_t<decltype(std::declval<T&>().bookmark())>> : std::true_type {};

template <typename T>
ElasticHooks elastic_hooks_of(T& part) {
  ElasticHooks hooks;
  if constexpr (kIsModuleHolder<T>) {
    if constexpr (HasRebind<std::decay_t<decltype(*part)>>::value) {
      hooks.rebind = [&part](const ProcessGroup& group) { part->rebind(group); };
    }
  } else if constexpr (HasRebind<T>::value) {
    hooks.rebind = [&part](const ProcessGroup& group) { part.rebind(group); };
  }
  if constexpr (HasBookmark<T>::value) {
    hooks.bookmark = [&part] { return part.bookmark(); };
    hooks.compares_itself = HasRebind<T>::value;
  } else if constexpr (std::is_same_v<T, GradScaler>) {
    // Shared: to copy a function would copy its tensors once more.
    hooks.bookmark = [&part] {
      return [&part, copy = std::make_shared<const GradScaler>(part)] { part = *copy; };
    };
  } else if constexpr (std::is_arithmetic_v<T>) {
    hooks.bookmark = [&part] { return [&part, copy = part] { part = copy; }; };
  }
  return hooks;
}

}  // namespace ddp::detail
