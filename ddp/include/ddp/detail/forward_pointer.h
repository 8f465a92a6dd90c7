#pragma once

// Not a public header: the signature of a module's forward.

#include <type_traits>
#include <utility>

namespace ddp::detail {

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
