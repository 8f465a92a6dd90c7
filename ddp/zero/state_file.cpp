#include "zero/state_file.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <ATen/ceil_div.h>
#include <c10/core/ScalarType.h>

namespace ddp {
namespace {

constexpr size_t kAlignment = 64;  // of vector instructions
constexpr size_t kMostWriting = size_t{16} << 20;
constexpr size_t kReadAhead = size_t{16} << 20;
constexpr size_t kMostMoved = size_t{16} << 20;

// The memory that a state had before it moved lies in the heap between small objects that stay, and
// may not fit the next one: half of the whole state would stay there.
void release_heap() {
#ifdef __GLIBC__
  ::malloc_trim(0);
#endif
}

size_t bytes_of(const StateFile::Entry& entry) {
  return at::round_up(static_cast<size_t>(entry.numel) * c10::elementSize(entry.type), kAlignment);
}

}  // namespace

StateFile::StateFile(const std::string& path, const std::vector<Entry>& entries) {
  size_t end = 0;
  for (const auto& entry : entries) {
    auto& place = places_[entry.parameter];
    place.span.offset = end;
    place.tensors.resize(entry.is_needed.size());
    for (const auto is_needed : entry.is_needed) end += is_needed ? bytes_of(entry) : 0;
    place.span.bytes = end - place.span.offset;
  }
  if (end == 0) return;
  file_ = MappedFile::make(path, end);
  for (const auto& entry : entries) {
    auto& place = places_[entry.parameter];
    auto offset = place.span.offset;
    for (size_t i = 0; i < entry.is_needed.size(); ++i) {
      if (!entry.is_needed[i]) continue;
      place.tensors[i] = file_->tensor(offset, entry.numel, entry.type);
      offset += bytes_of(entry);
    }
  }
}

void StateFile::keep(const void* parameter, size_t index, at::Tensor& tensor) {
  if (!tensor.defined()) return;
  const auto& place = places_.at(parameter).tensors[index];
  if (!place.defined() || tensor.is_same(place)) return;
  // With another dtype it stays in memory, for the optimizer to refuse or convert.
  if (tensor.numel() != place.numel() || tensor.scalar_type() != place.scalar_type()) return;
  place.copy_(tensor);
  bytes_moved_ += tensor.nbytes();
  tensor = place;
  if (bytes_moved_ < kMostMoved) return;
  bytes_moved_ = 0;
  release_heap();
}

FileSpan StateFile::span_of(const void* first, const void* last) const {
  const auto& from = places_.at(first).span;
  return {from.offset, places_.at(last).span.end() - from.offset};
}

void StateFile::prefetch(const void* first, const void* last) const {
  auto span = span_of(first, last);
  if (span.bytes == 0) return;
  span.bytes += kReadAhead;
  file_->prefetch(span);
}

void StateFile::write(const void* first, const void* last) {
  const auto span = span_of(first, last);
  if (span.bytes == 0) return;  // to the kernel this would be all
  writing_.push_back(span);
  bytes_writing_ += span.bytes;
  file_->start_writing(span);
  while (bytes_writing_ > kMostWriting && writing_.size() > 1) {
    const auto oldest = writing_.front();
    writing_.pop_front();
    bytes_writing_ -= oldest.bytes;
    file_->finish_writing(oldest);
  }
}

}  // namespace ddp
