#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/export.h>
#include <ddp/process_group.h>

/// Collectives that autograd goes through. The backward pass of each is another one of them, so
/// gradients of gradients work.
///
/// All of them are collective over their group, and so are their backward passes: a tensor must
/// require a gradient on all ranks of the group or on none. Ranks that differ get an error once one
/// of them waits for the other in the backward pass.
///
/// In a group of one rank each returns its input. Results lie in fresh memory otherwise, except for
/// copy_to_region(), whose result shares the input's.
///
/// On one device, backward passes run in the reverse order of the forward passes. Between
/// collectives of two groups the ranks need not agree on an order.
///
/// Blocks: host, until the collective is complete; with NCCL, the current stream.
/// Source: Megatron-LM, core/tensor_parallel/mappings.py.
namespace ddp::functional {

/// Begins a part of a model that is cut over the group: the ranks use the same `t` in different
/// ways, so their gradients are summed.
///
/// Forward: `t`. Backward: all-reduce.
DDP_API at::Tensor copy_to_region(const at::Tensor& t, const GroupArg& group = {});

/// Ends such a part: sums the ranks' results, which all ranks use in the same way after that.
///
/// Forward: all-reduce. Backward: the gradient.
DDP_API at::Tensor reduce_from_region(const at::Tensor& t, const GroupArg& group = {});

/// Takes this rank's part of a tensor that all ranks have.
///
/// \param dim  is cut into equal parts, rank 0's first.
/// \throws c10::ValueError  unless the group's size divides t.size(dim).
///
/// Forward: this rank's part. Backward: all-gather.
DDP_API at::Tensor scatter_to_region(
    const at::Tensor& t, const GroupArg& group = {}, int64_t dim = -1);

/// Joins the ranks' parts to a tensor that all ranks use in the same way.
///
/// \param t  of the same shape on all ranks. \param dim  along which they are joined.
///
/// Forward: all-gather. Backward: this rank's part of the gradient.
DDP_API at::Tensor gather_from_region(
    const at::Tensor& t, const GroupArg& group = {}, int64_t dim = -1);

/// Joins the ranks' parts to a tensor that the ranks use in different ways.
///
/// \param t, dim  as of gather_from_region().
///
/// Forward: all-gather. Backward: reduce-scatter, the sum.
DDP_API at::Tensor all_gather(const at::Tensor& t, int64_t dim, const GroupArg& group = {});

/// Sums the ranks' tensors, of which each rank gets its part.
///
/// \param t, dim  as of scatter_to_region(); of the same shape on all ranks.
///
/// Forward: reduce-scatter. Backward: all-gather.
DDP_API at::Tensor reduce_scatter(const at::Tensor& t, int64_t dim, const GroupArg& group = {});

/// Exchanges rows: rank i gets the i-th block of rows of every rank.
///
/// \param input_splits  how many rows of `t` each rank gets. \param output_splits  how many rows
/// each
///        rank sends to this one. Empty: equal blocks.
/// \throws c10::ValueError  if splits do not fit.
///
/// Forward: all-to-all. Backward: all-to-all with the splits exchanged.
DDP_API at::Tensor all_to_all(
    const at::Tensor& t, const std::vector<int64_t>& input_splits,
    const std::vector<int64_t>& output_splits, const GroupArg& group = {});

}  // namespace ddp::functional
