// What depends on LibTorch's version, in one place. Tried with the versions of the README.
#pragma once

#include <memory>

#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>

namespace ddp {

/// How autograd holds its nodes: std::shared_ptr, and since 2.12 or so c10::intrusive_ptr.
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

}  // namespace detail

/// A reference that keeps no graph alive; lock() gives a NodePtr.
using WeakNodePtr = detail::WeakOf<NodePtr>::type;

/// Where autograd will put the outcome, or the exception, of the backward pass that the calling
/// thread runs a part of; empty outside of one.
c10::intrusive_ptr<c10::ivalue::Future> current_backward_result();

}  // namespace ddp
