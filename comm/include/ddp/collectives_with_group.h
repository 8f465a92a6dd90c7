#pragma once

#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <ddp/collectives.h>

namespace ddp {

/// \file
/// The collectives of <ddp/collectives.h> with a group right after the arguments that have no
/// default: `ddp::all_reduce(tensor, group)`. Arguments that are left out have their defaults, such
/// as SUM.

namespace detail {
template <typename Group>
using IfGroup = std::enable_if_t<std::is_convertible_v<const Group&, GroupArg>, int>;
}  // namespace detail

/// Adds up `tensor` over all ranks of the group, in place.
template <typename Group, detail::IfGroup<Group> = 0>
void all_reduce(at::Tensor& tensor, const Group& group) {
  return all_reduce(tensor, c10d::ReduceOp::SUM, group);
}
/// The same for a temporary, and returns it.
template <typename Group, detail::IfGroup<Group> = 0>
at::Tensor all_reduce(at::Tensor&& tensor, const Group& group) {
  return all_reduce(std::move(tensor), c10d::ReduceOp::SUM, group);
}
/// `all_reduce` that returns at once.
template <typename Group, detail::IfGroup<Group> = 0>
c10::intrusive_ptr<c10d::Work> all_reduce_async(at::Tensor& tensor, const Group& group) {
  return all_reduce_async(tensor, c10d::ReduceOp::SUM, group);
}

/// Adds up `tensor` over all ranks to rank `dst` of the group.
template <typename Group, detail::IfGroup<Group> = 0>
void reduce(at::Tensor& tensor, int dst, const Group& group) {
  reduce(tensor, dst, c10d::ReduceOp::SUM, group);
}
/// `reduce` that returns at once.
template <typename Group, detail::IfGroup<Group> = 0>
c10::intrusive_ptr<c10d::Work> reduce_async(at::Tensor& tensor, int dst, const Group& group) {
  return reduce_async(tensor, dst, c10d::ReduceOp::SUM, group);
}

/// Adds up lists of tensors over all ranks; rank r gets the r-th sum.
template <typename Group, detail::IfGroup<Group> = 0>
void reduce_scatter(at::Tensor& output, const std::vector<at::Tensor>& inputs, const Group& group) {
  reduce_scatter(output, inputs, c10d::ReduceOp::SUM, group);
}
/// `reduce_scatter` that returns at once.
template <typename Group, detail::IfGroup<Group> = 0>
c10::intrusive_ptr<c10d::Work> reduce_scatter_async(
    at::Tensor& output, const std::vector<at::Tensor>& inputs, const Group& group) {
  return reduce_scatter_async(output, inputs, c10d::ReduceOp::SUM, group);
}

/// Adds up `input` over all ranks; rank r gets the r-th part of the sum.
template <typename Group, detail::IfGroup<Group> = 0>
void reduce_scatter_tensor(at::Tensor& output, const at::Tensor& input, const Group& group) {
  reduce_scatter_tensor(output, input, c10d::ReduceOp::SUM, group);
}
/// `reduce_scatter_tensor` that returns at once.
template <typename Group, detail::IfGroup<Group> = 0>
c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_async(
    at::Tensor& output, const at::Tensor& input, const Group& group) {
  return reduce_scatter_tensor_async(output, input, c10d::ReduceOp::SUM, group);
}

/// Sends the same number of rows of `input` to each rank, and receives as many from each.
template <typename Group, detail::IfGroup<Group> = 0>
void all_to_all_single(at::Tensor& output, const at::Tensor& input, const Group& group) {
  all_to_all_single(output, input, {}, {}, group);
}
/// `all_to_all_single` that returns at once.
template <typename Group, detail::IfGroup<Group> = 0>
c10::intrusive_ptr<c10d::Work> all_to_all_single_async(
    at::Tensor& output, const at::Tensor& input, const Group& group) {
  return all_to_all_single_async(output, input, {}, {}, group);
}

/// Sends `tensor` to rank `dst` of the group, with tag 0.
template <typename Group, detail::IfGroup<Group> = 0>
void send(const at::Tensor& tensor, int dst, const Group& group) {
  send(tensor, dst, 0, group);
}
/// `send` that returns at once.
template <typename Group, detail::IfGroup<Group> = 0>
c10::intrusive_ptr<c10d::Work> send_async(const at::Tensor& tensor, int dst, const Group& group) {
  return send_async(tensor, dst, 0, group);
}

/// Receives `tensor` from rank `src` of the group, or of any rank, with tag 0.
template <typename Group, detail::IfGroup<Group> = 0>
int recv(at::Tensor& tensor, std::optional<int> src, const Group& group) {
  return recv(tensor, src, 0, group);
}
/// `recv` that returns at once.
template <typename Group, detail::IfGroup<Group> = 0>
c10::intrusive_ptr<c10d::Work> recv_async(
    at::Tensor& tensor, std::optional<int> src, const Group& group) {
  return recv_async(tensor, src, 0, group);
}

}  // namespace ddp
