#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ddp/export.h>
#include <ddp/process_group.h>

/// Attention over sequences of which each rank of a group has a part.
///
///     tokens = ddp::functional::context_shard(tokens, 1, cp);           // [N, T / W]
///     auto positions = ddp::functional::context_positions(T, cp);       // of this rank's part
///     ...
///     auto y = ddp::functional::ring_attention(q, k, v, cp, /*is_causal=*/true);
///
/// The parts are cut for causal attention: of 2 W equal pieces rank r has piece r and piece
/// 2 W - 1 - r, so that all ranks attend to as many positions.
namespace ddp::functional {

/// Takes this rank's two pieces of a sequence that all ranks have.
///
/// \param t  the same on all ranks. \param dim  of the positions; a multiple of 2 W.
/// \return  `t` with T / W positions along `dim`.
/// \throws c10::ValueError  for another length: pad the sequence.
///
/// Backward: an all-gather: what comes before gets the gradient of the sum of the ranks' losses.
/// Collective: backward. Blocks: host.
DDP_API at::Tensor context_shard(const at::Tensor& t, int64_t dim, const GroupArg& group = {});

/// Undoes context_shard(): the whole sequence, which all ranks use in the same way.
///
/// Collective: yes: an all-gather. Backward: this rank's pieces. Blocks: host.
DDP_API at::Tensor context_gather(const at::Tensor& t, int64_t dim, const GroupArg& group = {});

/// The positions of this rank's part, for embeddings of positions and targets: [length / W], int64.
///
/// \param length  of the whole sequence.
DDP_API at::Tensor context_positions(int64_t length, const GroupArg& group = {});

/// Attention to the whole sequence, while keys and values of the ranks go round.
///
/// Each rank sends the keys and values that it has to the next rank while it attends to them.
///
/// \param q, k, v  [N, heads, T / W, d], the parts that context_shard() gives; of equal sizes on
/// all
///        ranks.
/// \param scale  of the scores; default 1 / sqrt(d).
/// \return  [N, heads, T / W, d]: scaled_dot_product_attention() of the whole sequence, cut.
/// \throws c10::ValueError  for other shapes, and tensors of a GPU.
///
/// Collective: yes, and backward. Blocks: host.
/// Memory: O(T / W): beside inputs and output the keys and values of two other ranks, in backward
/// with their gradients. Cost: W - 1 messages of keys and values each way, and W of their gradients
/// in backward, sent while the rank computes. No second derivative.
/// Source: Liu et al., Ring Attention with Blockwise Transformers, 2023;
/// torch.distributed.tensor.experimental.context_parallel, torch 2.11.0.
DDP_API at::Tensor ring_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const GroupArg& group = {},
    bool is_causal = false, std::optional<double> scale = {});

/// The same, for which each rank gets the whole sequence of some heads.
///
/// \param q, k, v, scale  as of ring_attention(); heads a multiple of the group's size.
///
/// Collective: yes, and backward: two all-to-alls each way. Blocks: host. Memory: O(T / W) a head
/// of all. Source: Jacobs et al., DeepSpeed Ulysses, 2023.
DDP_API at::Tensor all_to_all_attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const GroupArg& group = {},
    bool is_causal = false, std::optional<double> scale = {});

}  // namespace ddp::functional
