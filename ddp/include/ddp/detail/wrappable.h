#pragma once

// Not a public header: the types of modules that wrappers take, and the signature of their forward.

#include <memory>
#include <type_traits>
#include <utility>

#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

namespace ddp::detail {

/// Whether class `T` has members named `forward`, including overloads and templates, whose address
/// cannot be taken: then `forward` is ambiguous in a class derived from `T` and `Other`.
template <typename T>
class HasForward {
  struct Other {
    int forward;
  };
  template <typename U, bool is_open = std::is_class_v<U> && !std::is_final_v<U>>
  struct Both : U, Other {};
  template <typename U>
  struct Both<U, false> {};

  template <typename B>
  static std::false_type test(decltype(&B::forward));
  template <typename B>
  static std::true_type test(...);

 public:
  static constexpr bool value = decltype(test<Both<T>>(nullptr))::value;
};

template <typename M>
constexpr bool is_any_module = std::is_same_v<M, torch::nn::AnyModule>;
template <typename M>
constexpr bool is_module = std::is_base_of_v<torch::nn::Module, M>;
template <typename M>
constexpr bool is_shared_module =
    std::is_convertible_v<const M&, std::shared_ptr<torch::nn::Module>> && !is_module<M>;
template <typename M>
constexpr bool is_module_holder =
    std::is_base_of_v<torch::detail::ModuleHolderIndicator, M> && !is_any_module<M>;

template <typename M>
constexpr bool is_wrappable = is_shared_module<M> || is_module_holder<M>;

/// In place of what is not wrappable.
struct NotWrappable {
  template <typename T>
  NotWrappable(T&& /*anything*/) {}
};

template <typename M>
constexpr bool has_forward() {
  if constexpr (is_wrappable<M>) {
    return HasForward<std::decay_t<decltype(*std::declval<M&>())>>::value;
  } else {
    return true;  // a type that is not wrappable is another error
  }
}

/// Stands for a forward that is a template or overloaded.
struct Overloaded {};
/// The type of a pointer to the module's forward.
template <typename Module, typename = void>
struct ForwardPointer {
  using type = Overloaded;
};
template <typename Module>
struct ForwardPointer<Module, std::void_t<decltype(&Module::forward)>> {
  using type = decltype(&Module::forward);
};
/// The module in a holder or behind a pointer.
template <typename M>
using PointeeOf = std::decay_t<decltype(*std::declval<M&>())>;

}  // namespace ddp::detail
