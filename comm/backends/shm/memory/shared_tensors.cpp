#include "shared_tensors.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/ops/empty_like.h>

#include "tensors.h"

namespace ddp::backends::shm {
namespace {

// FNV-1a over whole numbers.
uint64_t mixed(uint64_t hash, uint64_t value) { return (hash ^ value) * 0x100000001b3; }

// Returns the address of a tensor. The table holds distances from itself, which are valid in every
// process. Copies bytes, because no object exists in the table, and another thread may own the
// memory next to it.
std::byte* place_in(std::byte* table, size_t index) {
  int64_t distance = 0;
  std::memcpy(&distance, table + index * sizeof(distance), sizeof(distance));
  return table + distance;
}

}  // namespace

SharedTensors::SharedTensors(std::vector<at::Tensor> tensors, Arena& arena, int rank, int ranks)
    : callers_(std::move(tensors)), rank_(rank) {
  for (const auto& t : callers_) {
    const auto numel = static_cast<size_t>(t.numel());
    auto own = t.is_contiguous() ? t : at::empty_like(t, at::MemoryFormat::Contiguous);
    assign(own, t);
    auto* data = bytes_of(own);
    const bool in_arena = numel > 0 && arena.offset_of(own).has_value();
    extents_.push_back({std::move(own), numel_, numel, data, in_arena ? data : nullptr});
    numel_ += numel;
  }
  begin_ = share_begin(numel_, rank, ranks);
  end_ = share_begin(numel_, rank + 1, ranks);
  std::byte* buffer = place_tensors(arena);
  if (buffer != nullptr)
    offset_ = arena.offset_at(buffer);  // tensors without elements have no memory
  for_each_part_of_other_shares(
      [](std::byte* own, std::byte* shown, size_t bytes) { std::memcpy(shown, own, bytes); });
}

/// Finds or allocates memory that the other ranks can read. \return its address.
std::byte* SharedTensors::place_tensors(Arena& arena) {
  const size_t element = callers_.front().element_size();
  const size_t table = extents_.size() > 1 ? in_lines(extents_.size() * sizeof(int64_t)) : 0;
  size_t bytes = table;
  for (const auto& extent : extents_) {
    if (extent.shown == nullptr) bytes += in_lines(extent.numel * element);
  }
  if (extents_.size() == 1 && extents_.front().shown != nullptr) return extents_.front().shown;
  memory_ = arena.allocate(static_cast<int64_t>(bytes), at::kByte, Arena::OnRelease::kKeep);
  auto* buffer = bytes_of(memory_);
  auto* copy = buffer + table;
  for (size_t i = 0; i < extents_.size(); ++i) {
    auto& extent = extents_[i];
    if (extent.shown == nullptr) {
      extent.shown = copy;
      copy += in_lines(extent.numel * element);
    }
    if (table == 0) continue;
    const int64_t distance = extent.shown - buffer;
    std::memcpy(buffer + i * sizeof(distance), &distance, sizeof(distance));
  }
  return buffer;
}

Descriptor SharedTensors::descriptor() const {
  Descriptor descriptor;
  descriptor.kind = Kind::AllReduce;
  descriptor.dtype = static_cast<int32_t>(callers_.front().scalar_type());
  descriptor.numel = numel_;
  descriptor.offset = offset_;
  descriptor.tensors = static_cast<uint32_t>(extents_.size());
  for (const auto& extent : extents_) descriptor.sizes = mixed(descriptor.sizes, extent.numel);
  return descriptor;
}

void SharedTensors::for_each_part_of_own_share(
    const std::vector<std::byte*>& buffers, c10::function_ref<void(const Part&)> body) const {
  Part part;
  part.places.resize(buffers.size());
  for (size_t i = 0; i < extents_.size(); ++i) {
    const auto& extent = extents_[i];
    const size_t first = std::max(begin_, extent.first);
    const size_t last = std::min(end_, extent.first + extent.numel);
    if (first >= last) continue;
    for (size_t r = 0; r < buffers.size(); ++r) {
      part.places[r] = extents_.size() == 1 ? buffers[r] : place_in(buffers[r], i);
    }
    part.places[static_cast<size_t>(rank_)] = extent.own;
    part.begin = first - extent.first;
    part.end = last - extent.first;
    body(part);
  }
}

void SharedTensors::for_each_part_of_other_shares(
    c10::function_ref<void(std::byte*, std::byte*, size_t)> body) const {
  const size_t element = callers_.front().element_size();
  const auto each = [&](const Extent& extent, size_t begin, size_t end) {
    const size_t first = std::max(begin, extent.first);
    const size_t last = std::min(end, extent.first + extent.numel);
    if (first >= last) return;
    const size_t from = (first - extent.first) * element;
    body(extent.own + from, extent.shown + from, (last - first) * element);
  };
  for (const auto& extent : extents_) {
    if (extent.own == extent.shown) continue;
    each(extent, 0, begin_);
    each(extent, end_, numel_);
  }
}

void SharedTensors::copy_out() const {
  for_each_part_of_other_shares(
      [](std::byte* own, std::byte* shown, size_t bytes) { std::memcpy(own, shown, bytes); });
  for (size_t i = 0; i < callers_.size(); ++i) assign(callers_[i], extents_[i].tensor);
}

}  // namespace ddp::backends::shm
