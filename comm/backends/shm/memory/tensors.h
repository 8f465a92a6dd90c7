// Helpers for the tensors of collectives: the caller's, and those that ranks share.
#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

#include "../sync/control_block.h"
#include "arena.h"

namespace ddp::backends::shm {

constexpr size_t kLine = 64;  // bytes of a cache line
inline size_t in_lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

/// The first element of rank's share of `numel` elements. It begins on a cache line, so that no two
/// ranks write to the same line.
size_t share_begin(size_t numel, int rank, int ranks);

/// Copies elements in their logical order, whatever the layouts. Does nothing if both are the same
/// tensor.
///
/// Runs below autograd, so that no version counter changes, as in Gloo's collectives. So it works
/// on any thread, whatever that thread's grad mode.
void assign(const at::Tensor& to, const at::Tensor& from);

at::Tensor flat(const at::Tensor& t);

std::byte* bytes_of(const at::Tensor& t);

/// A 1-D tensor of like's dtype and number of elements over `buffer`, which must outlive it.
at::Tensor at_buffer(std::byte* buffer, const at::Tensor& like);

std::vector<const std::byte*> as_sources(const std::vector<std::byte*>& buffers);

/// Whether `t` is a dense CPU tensor whose values are in memory (no lazy conj() or neg()).
bool is_plain(const at::Tensor& t);
/// Whether all tensors are plain and of one dtype.
bool are_plain(const std::vector<at::Tensor>& tensors);
/// Whether all tensors are plain, and have like's dtype and number of elements.
bool are_like(const std::vector<at::Tensor>& tensors, const at::Tensor& like);

/// Returns `t` itself if it lies in the arena, else a flat copy there.
///
/// \throws c10::OutOfMemoryError  if the arena is full.
at::Tensor shared(const at::Tensor& t, Arena& arena);

/// Implements `allocateTensor`: a tensor in the arena, or elsewhere if the arena is full.
///
/// \throws c10::ValueError  for another device than the CPU.
at::Tensor allocate_tensor(int64_t size, const at::TensorOptions& options, Arena& arena);

/// \param shared  a tensor in `arena`, or one whose memory no other rank reads.
Descriptor describe(Kind kind, const at::Tensor& shared, const Arena& arena);

}  // namespace ddp::backends::shm
