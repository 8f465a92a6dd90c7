#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <ddp/export.h>
#include <ddp/process_group.h>

namespace ddp {

/// \file
/// Collectives and point to point. Rules for all of them:
///
/// - Every rank of the group calls them, in the same order, with tensors of equal dtype, and of
///   equal shape unless the function says otherwise. Arguments are checked before anything is sent;
///   a bad one is a c10::ValueError on the rank that passed it.
/// - Every dtype can be sent. A reduction that the backend does not support for the tensor's dtype
///   throws c10::ValueError before anything is sent. Complex numbers can be added (SUM, AVG) but
///   not compared. On bool, SUM and MAX are "or"; PRODUCT and MIN are "and".
/// - Strides may differ between ranks. The library copies tensors that are not contiguous, and
/// inputs
///   that share memory with an output where a backend might overwrite them before they are sent.
/// - The plain call waits: the host waits for CPU tensors, the current stream for CUDA tensors. Its
///   _async twin returns a handle at once. The outputs are ready after the handle's wait(), or once
///   its isCompleted() is true. Before that, the caller may drop the tensors but must not write to
///   them, and must keep the handle of a send or a recv. After a failure isCompleted() is also
///   true, and wait() throws.
/// - If a rank does not call a collective, the other ranks throw within the group's timeout.
/// - AVG is SUM divided by the world size, for floating-point and complex tensors.

/// Reduces `tensor` over all ranks; every rank gets the result in place.
DDP_API void all_reduce(
    at::Tensor& tensor, c10d::ReduceOp op = c10d::ReduceOp::SUM, const GroupArg& group = {});
/// The same for a temporary, and returns it: `auto mean = ddp::all_reduce(loss.detach() / size);`
///
/// A view is reduced in place too: all_reduce(t[0]) writes to `t`. The returned tensor is detached,
/// because autograd has recorded only this rank's computation.
DDP_API at::Tensor all_reduce(
    at::Tensor&& tensor, c10d::ReduceOp op = c10d::ReduceOp::SUM, const GroupArg& group = {});
/// Rejects a const tensor at compile time.
template <typename Tensor>
std::enable_if_t<std::is_same_v<Tensor, const at::Tensor>> all_reduce(
    Tensor&, c10d::ReduceOp = c10d::ReduceOp::SUM, const GroupArg& = {}) {
  static_assert(
      !std::is_same_v<Tensor, const at::Tensor>,
      "ddp::all_reduce: expected a tensor to write the result to, got a const one. Pass one that "
      "is not const (parameter.mutable_grad() for a gradient), or a copy: auto sum = "
      "ddp::all_reduce(tensor.clone());");
}
/// `all_reduce` that returns at once.
DDP_API c10::intrusive_ptr<c10d::Work> all_reduce_async(
    at::Tensor& tensor, c10d::ReduceOp op = c10d::ReduceOp::SUM, const GroupArg& group = {});

/// Overwrites `tensor` on every rank with the values that it has on rank `src` of the group.
DDP_API void broadcast(at::Tensor& tensor, int src, const GroupArg& group = {});
/// `broadcast` that returns at once.
DDP_API c10::intrusive_ptr<c10d::Work> broadcast_async(
    at::Tensor& tensor, int src, const GroupArg& group = {});

/// Reduces `tensor` over all ranks to rank `dst` of the group, in place.
///
/// On the other ranks `tensor` is left with unspecified values, as in PyTorch.
DDP_API void reduce(
    at::Tensor& tensor, int dst, c10d::ReduceOp op = c10d::ReduceOp::SUM,
    const GroupArg& group = {});
/// `reduce` that returns at once.
DDP_API c10::intrusive_ptr<c10d::Work> reduce_async(
    at::Tensor& tensor, int dst, c10d::ReduceOp op = c10d::ReduceOp::SUM,
    const GroupArg& group = {});

/// Gathers every rank's `input` on every rank.
///
/// \param outputs  world-size tensors; `outputs[r]` has the shape of rank r's input. Shapes may
///        differ between ranks, as long as every rank gives the same list of shapes.
DDP_API void all_gather(
    std::vector<at::Tensor>& outputs, const at::Tensor& input, const GroupArg& group = {});
/// `all_gather` that returns at once.
DDP_API c10::intrusive_ptr<c10d::Work> all_gather_async(
    std::vector<at::Tensor>& outputs, const at::Tensor& input, const GroupArg& group = {});

/// Gathers every rank's `input` on rank `dst` of the group.
///
/// \param outputs  on `dst` world-size tensors of the shape of `input`; empty elsewhere.
DDP_API void gather(
    std::vector<at::Tensor>& outputs, const at::Tensor& input, int dst, const GroupArg& group = {});
/// `gather` that returns at once.
DDP_API c10::intrusive_ptr<c10d::Work> gather_async(
    std::vector<at::Tensor>& outputs, const at::Tensor& input, int dst, const GroupArg& group = {});

/// Sends each rank one tensor of rank `src` of the group.
///
/// \param output  receives `inputs[r]` of rank `src`, where r is this rank.
/// \param inputs  on `src` world-size tensors of the shape of `output`; empty elsewhere.
DDP_API void scatter(
    at::Tensor& output, const std::vector<at::Tensor>& inputs, int src, const GroupArg& group = {});
/// `scatter` that returns at once.
DDP_API c10::intrusive_ptr<c10d::Work> scatter_async(
    at::Tensor& output, const std::vector<at::Tensor>& inputs, int src, const GroupArg& group = {});

/// Reduces world-size lists of tensors over all ranks; rank r gets the r-th result.
///
/// \param output  of the shape of `inputs[rank]`.
/// \param inputs  world-size tensors, of the same list of shapes on every rank; shapes may differ
///        within it. Never written to.
DDP_API void reduce_scatter(
    at::Tensor& output, const std::vector<at::Tensor>& inputs,
    c10d::ReduceOp op = c10d::ReduceOp::SUM, const GroupArg& group = {});
/// `reduce_scatter` that returns at once.
DDP_API c10::intrusive_ptr<c10d::Work> reduce_scatter_async(
    at::Tensor& output, const std::vector<at::Tensor>& inputs,
    c10d::ReduceOp op = c10d::ReduceOp::SUM, const GroupArg& group = {});

/// Sends `inputs[r]` to rank r, for every r, and receives `outputs[r]` from it.
///
/// \param outputs  world-size tensors; `outputs[r]` has as many elements as rank r sends here.
/// \param inputs  world-size tensors, of any shapes.
DDP_API void all_to_all(
    std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
    const GroupArg& group = {});
/// `all_to_all` that returns at once.
DDP_API c10::intrusive_ptr<c10d::Work> all_to_all_async(
    std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
    const GroupArg& group = {});

/// Gathers every rank's `input` into one tensor, in the order of ranks.
///
/// \param output  as many elements as all inputs together: [W * n, ...] or [W, n, ...] for inputs
///        [n, ...].
DDP_API void all_gather_into_tensor(
    at::Tensor& output, const at::Tensor& input, const GroupArg& group = {});
/// `all_gather_into_tensor` that returns at once.
DDP_API c10::intrusive_ptr<c10d::Work> all_gather_into_tensor_async(
    at::Tensor& output, const at::Tensor& input, const GroupArg& group = {});

/// Reduces `input` over all ranks; rank r gets the r-th of its world-size equal parts.
///
/// \param input  as many elements as all outputs together. Never written to.
DDP_API void reduce_scatter_tensor(
    at::Tensor& output, const at::Tensor& input, c10d::ReduceOp op = c10d::ReduceOp::SUM,
    const GroupArg& group = {});
/// `reduce_scatter_tensor` that returns at once.
DDP_API c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_async(
    at::Tensor& output, const at::Tensor& input, c10d::ReduceOp op = c10d::ReduceOp::SUM,
    const GroupArg& group = {});

/// Reduces `tensor` over the ranks of a grid in place, in three steps: a reduce-scatter over
/// `inner`, an all-reduce of each part over `outer`, and an all-gather over `inner`. Where inner
/// groups are hosts, the network carries as many bytes as if one rank of each host sent its tensor,
/// and all ranks of a host send their part of them at the same time.
///
/// \param inner  this rank and the ranks near it, such as those of one host.
/// \param outer  the ranks that have the same rank in their inner group.
///
/// Collective: over both groups. Has no _async twin. Cost: a copy of the tensor.
DDP_API void hierarchical_all_reduce(
    at::Tensor& tensor, const GroupArg& inner, const GroupArg& outer,
    c10d::ReduceOp op = c10d::ReduceOp::SUM);

/// Sends each rank some rows of `input`, and receives rows of `output` from each.
/// \param output_splits, input_splits  how many rows come from each rank and go to it, by rank;
///        empty: the same number for each. Sizes of the other dimensions are the same on all ranks.
DDP_API void all_to_all_single(
    at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits = {},
    const std::vector<int64_t>& input_splits = {}, const GroupArg& group = {});
/// `all_to_all_single` that returns at once.
DDP_API c10::intrusive_ptr<c10d::Work> all_to_all_single_async(
    at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_splits = {},
    const std::vector<int64_t>& input_splits = {}, const GroupArg& group = {});

/// Sends `tensor` to rank `dst` of the group, which must receive it with the same tag.
///
/// Messages of one sender and one tag arrive in the order of sending. A send ends once its message
/// is received: ranks that send to each other both start with send_async, or one of them receives
/// first.
///
/// \param tag  from 0 to 2^30 - 1.
DDP_API void send(const at::Tensor& tensor, int dst, int tag = 0, const GroupArg& group = {});
/// `send` that returns at once.
DDP_API c10::intrusive_ptr<c10d::Work> send_async(
    const at::Tensor& tensor, int dst, int tag = 0, const GroupArg& group = {});

/// Receives `tensor`, of the dtype and number of elements that were sent, from rank `src` of the
/// group, or from whichever rank of the group sends first.
///
/// \param src  std::nullopt: any other rank, over every backend but NCCL.
/// \return  the sender's rank in the group; Python's recv returns its rank in the world.
/// \throws c10::DistBackendError  over Gloo and shm, with both descriptions, if the sender sent
///         another dtype or number of elements; as after any failure, the group is then aborted.
///         Also if no rank sends within the group's timeout.
///
/// Receives that fit the same message get the messages in the order of the calls. Messages of
/// several senders come in any order, so a program must not depend on it.
/// Source: torch.distributed.recv, torch 2.11.0.
DDP_API int recv(
    at::Tensor& tensor, std::optional<int> src, int tag = 0, const GroupArg& group = {});
/// `recv` that returns at once. After the wait, the handle's `sourceRank()` is the sender where
/// `src` is std::nullopt.
DDP_API c10::intrusive_ptr<c10d::Work> recv_async(
    at::Tensor& tensor, std::optional<int> src, int tag = 0, const GroupArg& group = {});

/// A message of `batch_isend_irecv`.
class P2POp {
 public:
  /// Whether this rank sends or receives.
  enum class Kind { Send, Recv };

  /// Sends `tensor` to rank `dst` of the group.
  static P2POp send(at::Tensor tensor, int dst, int tag = 0) {
    return {Kind::Send, std::move(tensor), dst, tag};
  }
  /// Overwrites `tensor` with the message of rank `src` of the group.
  static P2POp recv(at::Tensor tensor, int src, int tag = 0) {
    return {Kind::Recv, std::move(tensor), src, tag};
  }

  /// Whether this rank sends or receives.
  Kind kind() const { return kind_; }
  /// What is sent, or overwritten.
  const at::Tensor& tensor() const { return tensor_; }
  /// The other rank, of the group.
  int peer() const { return peer_; }
  /// Of `send` and `recv`.
  int tag() const { return tag_; }

 private:
  P2POp(Kind kind, at::Tensor tensor, int peer, int tag)
      : kind_(kind), tensor_(std::move(tensor)), peer_(peer), tag_(tag) {}

  Kind kind_;
  at::Tensor tensor_;
  int peer_;
  int tag_;
};

/// Starts several sends and recvs at a time, so that their order does not matter: over NCCL ranks
/// that each send before they receive wait for each other, as the stream of two ranks carries one
/// message after the other.
///
/// \param ops  not empty; their tensors on one kind of device. A rank gives as many sends to
///        another one as that one gives recvs from it.
///        Over NCCL tags are ignored: the messages from one rank to another match in their
///        order.
/// \return  handles, each to be waited for and kept: over NCCL one for all, else one a message.
///
/// Collective: over NCCL, the first call in a group is one of all its ranks. Blocks: nothing.
/// Source: torch.distributed.batch_isend_irecv, torch 2.11.0.
DDP_API std::vector<c10::intrusive_ptr<c10d::Work>> batch_isend_irecv(
    const std::vector<P2POp>& ops, const GroupArg& group = {});

/// Returns when every rank of the group has called it, and on GPUs has done what it queued before:
/// on the group's device_id, else the current GPU where the group has no backend for the CPU.
DDP_API void barrier(const GroupArg& group = {});
/// `barrier` that returns at once.
DDP_API c10::intrusive_ptr<c10d::Work> barrier_async(const GroupArg& group = {});

/// Gathers one string from every rank, each of any length: names, error texts, descriptions.
///
/// \return world-size strings, by rank; the same on all ranks.
///
/// Blocks: host. Has no _async twin.
/// Cost: an all-gather of 1 KiB, and if a string is longer than 1016 bytes, another one of what the
/// longest string has beyond that.
DDP_API std::vector<std::string> all_gather_strings(
    const std::string& text, const GroupArg& group = {});

/// A barrier that names the ranks that are missing.
///
/// \param timeout  how long to wait for all ranks; > 0.
/// \throws c10::Error  on every rank that called it, with the same list of the missing ranks.
///
/// Blocks: host. Has no _async twin.
/// Cost: milliseconds, because it goes through the group's store; not for loops.
DDP_API void monitored_barrier(std::chrono::milliseconds timeout, const GroupArg& group = {});

}  // namespace ddp

#include <ddp/collectives_with_group.h>
