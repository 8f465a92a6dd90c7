#include "exchanged_tensors.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <ddp/internal/text.h>

#include "tensors.h"

namespace ddp::backends::shm {
namespace {

// A row of a rank's table, for one peer: the sizes of the messages to it and from it, in bytes.
struct Row {
  int64_t distance = 0;  // of the first byte, from the table, so it is valid in every process
  uint64_t sent = 0;
  uint64_t expected = 0;
  uint64_t copied = 0;  // not 0: the tensor is sent through slots
};

// Copies bytes, because no object of type Row exists in the table, and another thread may own the
// memory next to it.
Row row_of(const std::byte* table, size_t rank) {
  Row row;
  std::memcpy(&row, table + rank * sizeof(row), sizeof(row));
  return row;
}

size_t slots_of(uint64_t bytes) { return bytes > ExchangedTensors::kSlot ? 2 : 1; }

// The slot, of the slots of one tensor, that a round uses.
size_t slot_at(uint64_t round) { return round % 2 * ExchangedTensors::kSlot; }

// How many bytes of a tensor a round transfers.
size_t bytes_in(uint64_t round, uint64_t bytes) {
  const auto begin = std::min<uint64_t>(round * ExchangedTensors::kSlot, bytes);
  return std::min<uint64_t>(bytes - begin, ExchangedTensors::kSlot);
}

at::Tensor contiguous_for(const at::Tensor& t) {
  return t.is_contiguous() ? t : at::empty_like(t, at::MemoryFormat::Contiguous);
}

}  // namespace

ExchangedTensors::ExchangedTensors(
    std::vector<at::Tensor> outputs, const std::vector<at::Tensor>& inputs, Arena& arena, int rank)
    : outputs_(std::move(outputs)), rank_(static_cast<size_t>(rank)) {
  for (const auto& output : outputs_) received_.push_back(contiguous_for(output));
  for (const auto& input : inputs) {
    sent_.push_back(contiguous_for(input));
    assign(sent_.back(), input);
  }
  place_inputs(arena);
  fill_slots(0);
}

void ExchangedTensors::place_inputs(Arena& arena) {
  const size_t table = in_lines(sent_.size() * sizeof(Row));
  size_t bytes = table;
  const auto is_copied = [&](size_t receiver) {
    const auto& t = sent_[receiver];
    return receiver != rank_ && t.numel() > 0 && !arena.offset_of(t);
  };
  const auto bytes_in_slots = [](const at::Tensor& t) {
    return slots_of(t.nbytes()) * in_lines(bytes_in(0, t.nbytes()));
  };
  for (size_t receiver = 0; receiver < sent_.size(); ++receiver) {
    if (is_copied(receiver)) bytes += bytes_in_slots(sent_[receiver]);
  }
  memory_ = arena.allocate(static_cast<int64_t>(bytes), at::kByte, Arena::OnRelease::kKeep);
  auto* const buffer = bytes_of(memory_);
  offset_ = arena.offset_at(buffer);
  auto* slot = buffer + table;
  for (size_t receiver = 0; receiver < sent_.size(); ++receiver) {
    const auto& t = sent_[receiver];
    Row row;
    row.sent = t.nbytes();
    row.expected = received_[receiver].nbytes();
    slots_.push_back(is_copied(receiver) ? slot : nullptr);
    if (is_copied(receiver)) {
      row.copied = 1;
      row.distance = slot - buffer;
      slot += bytes_in_slots(t);
    } else if (receiver != rank_ && row.sent > 0) {
      row.distance = bytes_of(t) - buffer;
    }
    std::memcpy(buffer + receiver * sizeof(row), &row, sizeof(row));
  }
}

void ExchangedTensors::fill_slots(uint64_t round) {
  for (size_t receiver = 0; receiver < sent_.size(); ++receiver) {
    const auto& t = sent_[receiver];
    const auto bytes = bytes_in(round, t.nbytes());
    if (slots_[receiver] == nullptr || bytes == 0) continue;
    std::memcpy(slots_[receiver] + slot_at(round), bytes_of(t) + round * kSlot, bytes);
  }
}

Descriptor ExchangedTensors::descriptor() const {
  Descriptor descriptor;
  descriptor.kind = Kind::AllToAll;
  descriptor.dtype = static_cast<int32_t>(outputs_.front().scalar_type());
  descriptor.offset = offset_;
  return descriptor;
}

Agreement ExchangedTensors::compare_tables(const std::vector<std::byte*>& buffers) const {
  Agreement agreement;
  for (size_t sender = 0; sender < buffers.size(); ++sender) {
    for (size_t receiver = 0; receiver < buffers.size(); ++receiver) {
      const auto row = row_of(buffers[sender], receiver);
      const auto expected = row_of(buffers[receiver], sender).expected;
      if (row.sent != expected) {
        const auto element = outputs_.front().element_size();
        agreement.mismatch = ddp::str(
            "shm: all_to_all: expected every rank to receive as many elements as are sent to it, "
            "but rank ",
            sender, " sends ", row.sent / element, " to rank ", receiver, ", which expects ",
            expected / element,
            ". Let the output splits on each rank be the other ranks' input splits for it.");
        return agreement;
      }
      if (row.copied != 0) {
        agreement.rounds = std::max(agreement.rounds, (row.sent + kSlot - 1) / kSlot);
      }
    }
  }
  return agreement;
}

void ExchangedTensors::exchange(const std::vector<std::byte*>& buffers) {
  for (size_t sender = 0; sender < buffers.size(); ++sender) receive_from(sender, buffers);
  ++round_;
  fill_slots(round_);
}

void ExchangedTensors::receive_from(size_t sender, const std::vector<std::byte*>& buffers) {
  const auto& to = received_[sender];
  if (sender == rank_) {
    if (round_ == 0) assign(to, flat(sent_[sender]).view(to.sizes()));
    return;
  }
  const auto row = row_of(buffers[sender], rank_);
  TORCH_INTERNAL_ASSERT(row.sent == to.nbytes(), "compare_tables() refuses this");
  if (row.sent == 0) return;
  const auto* from = buffers[sender] + row.distance;
  if (row.copied == 0) {
    if (round_ == 0) std::memcpy(bytes_of(to), from, row.sent);
    return;
  }
  const auto bytes = bytes_in(round_, row.sent);
  if (bytes == 0) return;
  std::memcpy(bytes_of(to) + round_ * kSlot, from + slot_at(round_), bytes);
}

void ExchangedTensors::copy_out() const {
  for (size_t sender = 0; sender < outputs_.size(); ++sender) {
    assign(outputs_[sender], received_[sender]);
  }
}

}  // namespace ddp::backends::shm
