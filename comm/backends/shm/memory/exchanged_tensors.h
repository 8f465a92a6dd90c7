#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "../sync/agreement.h"
#include "../sync/control_block.h"
#include "arena.h"

namespace ddp::backends::shm {

/// One all-to-all as this rank sees it: the tensors that it sends to each rank, and those that it
/// receives from each.
///
/// Other ranks read a tensor in the arena where it lies. Of another tensor, the arena gets a copy:
/// of one up to kSlot bytes as a whole, of a larger one slot by slot. The slots of a tensor are
/// two: the receiver reads the one in the round in which the sender fills the other. So an
/// all-to-all takes at most 2 * kSlot bytes of the arena for each receiver.
///
/// What the other ranks see begins with a table: what this rank sends to and expects from each.
class ExchangedTensors {
 public:
  static constexpr size_t kSlot = size_t{1} << 20;  // bytes; the same on all ranks

  /// \param outputs, inputs  plain, of one dtype, one for each rank.
  /// \throws c10::OutOfMemoryError  when the arena is full.
  ExchangedTensors(
      std::vector<at::Tensor> outputs, const std::vector<at::Tensor>& inputs, Arena& arena,
      int rank);

  Descriptor descriptor() const;

  /// \param buffers  by rank, what its descriptor points to.
  /// \return  the rounds that the largest copied tensor takes; or which rank expects what another
  ///          one does not send.
  Agreement agree(const std::vector<std::byte*>& buffers) const;

  /// One round: receives what the other ranks' slots hold, and fills this rank's other slots.
  void exchange(const std::vector<std::byte*>& buffers);

  /// When all rounds are over: brings what was received to the outputs that are not contiguous.
  void copy_out() const;

 private:
  void place_inputs(Arena& arena);
  void fill_slots(uint64_t round);
  void receive_from(size_t sender, const std::vector<std::byte*>& buffers);

  const std::vector<at::Tensor> outputs_;
  const size_t rank_;
  std::vector<at::Tensor> received_;  // by sender: the outputs, or contiguous stand-ins
  std::vector<at::Tensor> sent_;      // by receiver, contiguous
  std::vector<std::byte*> slots_;     // by receiver; null where nothing is copied
  at::Tensor memory_;                 // the table and the slots
  uint64_t round_ = 0;
  uint64_t offset_ = 0;  // of the table
};

}  // namespace ddp::backends::shm
