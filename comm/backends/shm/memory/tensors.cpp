#include "tensors.h"

#include <cstring>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>

namespace ddp::backends::shm {

size_t share_begin(size_t numel, int rank, int ranks) {
  if (rank == ranks) return numel;
  return numel / static_cast<size_t>(ranks) * static_cast<size_t>(rank) / kLine * kLine;
}

void assign(const at::Tensor& to, const at::Tensor& from) {
  if (to.is_same(from) || to.numel() == 0)
    return;  // an empty tensor may be null, which memcpy forbids
  const bool is_as_large = to.nbytes() == from.nbytes();  // copy_() refuses what is not
  if (is_as_large && to.is_contiguous() && from.is_contiguous()) {
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor(to).copy_(from.view(to.sizes()));
}

at::Tensor flat(const at::Tensor& t) {
  if (t.dim() == 1 && t.is_contiguous()) return t;  // a new view would raise its use count
  const at::AutoDispatchBelowADInplaceOrView below;
  return t.reshape({-1});
}

std::byte* bytes_of(const at::Tensor& t) { return static_cast<std::byte*>(t.mutable_data_ptr()); }

at::Tensor at_buffer(std::byte* buffer, const at::Tensor& like) {
  return at::from_blob(buffer, {like.numel()}, at::TensorOptions().dtype(like.scalar_type()));
}

std::vector<const std::byte*> as_sources(const std::vector<std::byte*>& buffers) {
  return {buffers.begin(), buffers.end()};
}

bool is_plain(const at::Tensor& t) {
  return t.layout() == at::kStrided && t.device().is_cpu() && !t.is_conj() && !t.is_neg();
}

bool are_plain(const std::vector<at::Tensor>& tensors) {
  return all_of(tensors, [&](const auto& t) {
    return is_plain(t) && t.scalar_type() == tensors[0].scalar_type();
  });
}

bool are_like(const std::vector<at::Tensor>& tensors, const at::Tensor& like) {
  return all_of(tensors, [&](const auto& t) {
    return is_plain(t) && t.scalar_type() == like.scalar_type() && t.numel() == like.numel();
  });
}

at::Tensor shared(const at::Tensor& t, Arena& arena) {
  if (t.is_contiguous() && arena.offset_of(t)) return t;
  auto copy = arena.allocate(t.numel(), t.scalar_type(), Arena::OnRelease::kKeep);
  assign(copy, flat(t));
  return copy;
}

at::Tensor allocate_tensor(int64_t size, const at::TensorOptions& options, Arena& arena) {
  DDP_CHECK_VALUE(
      options.device().is_cpu(), "shm: expected to allocate memory of the CPU, got ",
      options.device(), ".");
  try {
    return arena.allocate(
        size, c10::typeMetaToScalarType(options.dtype()), Arena::OnRelease::kDiscard);
  } catch (const c10::OutOfMemoryError&) {
    return at::empty({size}, options);  // collectives copy it in and out
  }
}

Descriptor describe(Kind kind, const at::Tensor& shared, const Arena& arena) {
  Descriptor descriptor;
  descriptor.kind = kind;
  descriptor.dtype = static_cast<int32_t>(shared.scalar_type());
  descriptor.numel = static_cast<uint64_t>(shared.numel());
  descriptor.offset = arena.offset_of(shared).value_or(0);
  return descriptor;
}

}  // namespace ddp::backends::shm
