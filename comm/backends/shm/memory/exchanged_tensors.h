#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "../sync/control_block.h"
#include "arena.h"

namespace ddp::backends::shm {

/// One all-to-all of this rank: the tensors that it sends to each rank, and the tensors that it
/// receives from each.
///
/// Other ranks read a tensor in the arena in place. Any other tensor is copied to the arena: as a
/// whole if it has at most kSlot bytes, slot by slot if it is larger. A tensor has two slots: in
/// each round the receiver reads one while the sender fills the other. So an all-to-all takes at
/// most 2 * kSlot bytes of the arena for each receiver.
///
/// The memory that other ranks read begins with a table of what this rank sends to and expects from
/// each rank.
class ExchangedTensors {
 public:
  static constexpr size_t kSlot = size_t{1} << 20;  // bytes; the same on all ranks

  /// \param outputs, inputs  plain, of one dtype, one for each rank.
  /// \throws c10::OutOfMemoryError  if the arena is full.
  ExchangedTensors(
      std::vector<at::Tensor> outputs, const std::vector<at::Tensor>& inputs, Arena& arena,
      int rank);

  Descriptor descriptor() const;

  /// Compares the ranks' tables.
  ///
  /// \param buffers  by rank, the memory at the offset of its descriptor.
  /// \return  the rounds that the largest copied tensor takes; or which rank expects another size
  ///          than is sent to it.
  Agreement compare_tables(const std::vector<std::byte*>& buffers) const;

  /// Runs one round: reads the other ranks' slots, and fills this rank's other slots.
  void exchange(const std::vector<std::byte*>& buffers);

  /// Copies received tensors to the outputs that are not contiguous. Called after the last round.
  void copy_out() const;

 private:
  void place_inputs(Arena& arena);
  void fill_slots(uint64_t round);
  void receive_from(size_t sender, const std::vector<std::byte*>& buffers);

  const std::vector<at::Tensor> outputs_;
  const size_t rank_;
  std::vector<at::Tensor> received_;  // by sender: the outputs, or contiguous replacements
  std::vector<at::Tensor> sent_;      // by receiver, contiguous
  std::vector<std::byte*> slots_;     // by receiver; null if it is not copied
  at::Tensor memory_;                 // the table and the slots
  uint64_t round_ = 0;
  uint64_t offset_ = 0;  // of the table
};

}  // namespace ddp::backends::shm
