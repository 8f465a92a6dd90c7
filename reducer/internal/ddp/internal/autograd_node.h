// References to autograd's nodes, which LibTorch's versions count in different ways.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>

namespace ddp {

/// How autograd holds its nodes: std::shared_ptr, and since 2.13 c10::intrusive_ptr.
using NodePtr = decltype(torch::autograd::Edge::function);

namespace detail {

template <typename Pointer>
struct WeakOf;
template <typename T>
struct WeakOf<std::shared_ptr<T>> {
  using type = std::weak_ptr<T>;
};
template <typename T>
struct WeakOf<c10::intrusive_ptr<T>> {
  using type = c10::weak_intrusive_ptr<T>;
};

// A template of the pointer type as well, because the branch that is not taken need not compile.
template <typename T, typename Pointer, typename... Args>
Pointer make_counted(Args&&... args) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<typename Pointer::element_type>>) {
    return std::make_shared<T>(std::forward<Args>(args)...);
  } else {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  }
}

}  // namespace detail

/// A reference that does not keep a graph alive; lock() gives a NodePtr.
using WeakNodePtr = detail::WeakOf<NodePtr>::type;

/// A node of class T, which derives from torch::autograd::Node.
template <typename T, typename... Args>
NodePtr make_node(Args&&... args) {
  return detail::make_counted<T, NodePtr>(std::forward<Args>(args)...);
}

}  // namespace ddp
