#include "arena.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <ATen/ops/from_blob.h>
#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>

namespace ddp::backends::shm {
namespace {

// Each block begins on a page of its own, so that discard() can free all of it.
size_t in_pages(size_t bytes) {
  const auto page = page_bytes();
  return std::max((bytes + page - 1) / page, size_t{1}) * page;
}

}  // namespace

Arena::Arena(std::shared_ptr<Segment> segment, size_t bytes) : segment_(std::move(segment)) {
  free_[0] = bytes;
}

void Arena::keep(std::shared_ptr<const void> memory) {
  if (!memory) return;
  const std::lock_guard lock(mutex_);
  if (!frozen_) kept_.push_back(std::move(memory));
}

void Arena::freeze() {
  std::vector<std::shared_ptr<const void>> kept;  // dropped without the lock, which release() takes
  const std::lock_guard lock(mutex_);
  frozen_ = true;
  kept.swap(kept_);
}

void Arena::discard_free() {
  const std::lock_guard lock(mutex_);
  for (const auto& [offset, bytes] : free_) segment_->discard(offset, bytes);
}

at::Tensor Arena::allocate(int64_t numel, at::ScalarType type, OnRelease on_release) {
  const size_t bytes = static_cast<size_t>(numel) * c10::elementSize(type);
  auto* block = try_reserve(bytes);
  DDP_CHECK_WITH(
      OutOfMemoryError, block != nullptr, "shared memory: expected ", in_pages(bytes),
      " bytes in one block, but the ", segment_->bytes(), " of this rank are in use.");
  const auto self = shared_from_this();
  return at::from_blob(
      block, {numel}, [=](void*) { self->release(block, bytes, on_release); },
      at::TensorOptions().dtype(type));
}

std::optional<size_t> Arena::offset_of(const at::Tensor& t) const {
  const auto* data = static_cast<const std::byte*>(t.const_data_ptr());
  const std::byte* begin = segment_->data();
  if (data < begin || data >= begin + segment_->bytes()) return std::nullopt;
  return static_cast<size_t>(data - begin);
}

std::byte* Arena::try_reserve(size_t bytes) {
  bytes = in_pages(bytes);
  const std::lock_guard lock(mutex_);
  const auto block = find_if(free_, [&](const auto& entry) { return entry.second >= bytes; });
  if (block == free_.end()) return nullptr;
  const auto [offset, size] = *block;
  free_.erase(block);
  if (size > bytes) free_[offset + bytes] = size - bytes;
  return segment_->data() + offset;
}

void Arena::release(std::byte* block, size_t bytes, OnRelease on_release) {
  bytes = in_pages(bytes);
  auto offset = static_cast<size_t>(block - segment_->data());
  const std::lock_guard lock(mutex_);
  if (frozen_) return;
  if (on_release == OnRelease::kDiscard) segment_->discard(offset, bytes);
  auto next = free_.lower_bound(offset);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      free_.erase(before);
    }
  }
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    free_.erase(next);
  }
  free_[offset] = bytes;
}

}  // namespace ddp::backends::shm
