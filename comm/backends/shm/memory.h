// What collectives do with memory: theirs, the caller's, and what ranks share.
#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

#include "arena.h"
#include "board.h"

namespace ddp::backends::shm {

/// Where rank r's part of `numel` elements begins: on a cache line, so that no two ranks write one.
size_t part_begin(size_t numel, int rank, int ranks);

/// Copies elements in their logical order, whatever the layouts; nothing for one and the same.
///
/// Without autograd and its version counter: nothing that it saved depends on what a collective
/// brings, as with Gloo. On any thread, whatever mode that is in.
void assign(const at::Tensor& to, const at::Tensor& from);

at::Tensor flat(const at::Tensor& t);

std::byte* bytes_of(const at::Tensor& t);

/// As many elements of that dtype at `buffer`, which has to outlive it.
at::Tensor at_buffer(std::byte* buffer, const at::Tensor& like);

std::vector<const std::byte*> as_sources(const std::vector<std::byte*>& buffers);

/// A dense CPU tensor whose memory is what it says.
bool is_plain(const at::Tensor& t);
bool are_plain(const std::vector<at::Tensor>& tensors);  // and of one dtype
bool are_like(const std::vector<at::Tensor>& tensors, const at::Tensor& like);

/// `t` itself where the other ranks see it, else a flat copy where they do.
at::Tensor shared(const at::Tensor& t, Arena& arena);

/// A tensor that `allocateTensor` makes: in the arena, or elsewhere when that is full.
///
/// \throws c10::ValueError  for another device's.
at::Tensor allocate_tensor(int64_t size, const at::TensorOptions& options, Arena& arena);

/// \param shared  a tensor that lies in `arena`, or whose memory nobody else looks at.
Descriptor describe(Kind kind, const at::Tensor& shared, const Arena& arena);

}  // namespace ddp::backends::shm
