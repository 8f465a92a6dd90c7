#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/process_group.h>

#include "sharded/flat_segment.h"
#include "sharded/gradient_notes.h"

namespace ddp {

/// The gradients of a unit: in a backward pass autograd accumulates whole ones, which are summed
/// over the ranks into the shards' `.grad`.
class UnitGradients {
 public:
  struct Groups {
    ProcessGroup shard;      ///< gets the gradients' parts
    ProcessGroup replicate;  ///< null, or the ranks with the same shards, which sum them
  };
  /// \param segments  must outlive this.
  UnitGradients(std::vector<FlatSegment>& segments, at::ScalarType reduce_dtype);

  /// Parameters are counted through all segments.
  size_t size() const { return slots_.size(); }
  const at::Tensor& parameter(size_t i) const;
  bool has_trainable() const;

  void begin();
  /// Whether a program changed `.grad` in place, and not to zeros, after a pass without reduction:
  /// what such passes kept would not follow. A rank without elements of it cannot tell.
  bool is_changed(size_t i) const;
  /// Before the first gradient of a pass is added to `.grad`: sets what is there aside.
  void before_accumulate(size_t i);
  void after_accumulate(size_t i);
  /// In a pass without reduction: moves the gradients that are there to what such passes
  /// accumulated.
  void fold();
  /// Whether all parameters have their gradient.
  bool is_complete() const;
  bool is_reduced() const { return is_reduced_; }

  /// The bytes of the trainable parameters' whole gradients, as autograd makes them.
  std::vector<size_t> gradient_bytes() const;
  /// Memory that reduce() packs into: 1-D, of this many elements and these options.
  int64_t packed_numel() const { return segments_.front().layout().ranks * slice_numel(); }
  at::TensorOptions packed_options() const;
  /// Packs the gradients, frees them, and starts to sum them. Parameters without one add zeros.
  ///
  /// \param packed  memory; free again after finish_reduction().
  /// \param number  of the unit, the same on all ranks; its last 16 bits travel.
  ///
  /// Collective: yes. Blocks: no.
  void reduce(const Groups& groups, at::Tensor packed, int64_t number);
  /// Waits for the sum, and sums over the ranks with the same shards. Where shards rest on the
  /// host, begins to copy it there.
  ///
  /// Collective: over these ranks.
  void finish_reduction(const Groups& groups);
  int64_t reduced_bytes() const;

  /// Reads which parameters got a gradient, once the sum is where shards rest.
  ///
  /// \return  nothing where all ranks gave gradients of the same unit. Else, on all ranks, the
  /// number
  ///         of the unit that the others gave, or 0 where they gave several.
  std::optional<int64_t> read_notes(const Groups& groups);
  /// After read_notes(): whether ranks scaled the gradients of the pass before by different
  /// factors; the same on all ranks. Not with sums of 16 bits.
  bool are_scaled_apart() const;
  /// Notes what forward wrote to the whole parameters.
  void note_writes(uint64_t hash);
  /// After read_notes(): whether ranks noted different writes since the pass before; the same on
  /// all ranks.
  bool are_written_apart(const Groups& groups) const;
  /// Ends the pass, after read_notes(): adds the sums to `.grad`.
  void add_to_shards();
  /// Ends a pass without reduction: keeps the whole gradients for the next one.
  void keep_whole();
  /// Ends a pass that failed: `.grad` is what it was. What passes without reduction accumulated
  /// may have gradients of this one; zero_grad() drops it.
  void restore();
  /// Whether a gradient came in this pass.
  bool has_begun() const;
  /// Whether passes without reduction left gradients.
  bool has_kept() const;

 private:
  struct Slot {
    size_t segment;
    size_t slot;  // in the segment
    bool has_begun = false;
    bool has_arrived = false;
    at::Tensor before;  // `.grad` before the pass
    at::Tensor kept;    // accumulated without reduction
    at::Tensor marker;  // what `.grad` shows meanwhile: a program clears it to drop `kept`
    int64_t marker_version = 0;
  };

  /// The program's change of `.grad` since a pass without reduction.
  enum class Since { Same, Cleared, Changed };
  Since since_kept(const Slot& slot) const;
  void begin_slot(Slot& slot);
  void fold(Slot& slot);
  /// Beside the gradients: whether there is one, for each parameter, the unit's number, by what
  /// this rank scaled the ones before, and what forward wrote.
  int64_t notes_numel() const {
    return static_cast<int64_t>(slots_.size()) + 2 * kNumberNotes + kFactorNotes;
  }
  int64_t slice_numel() const;
  void pack(at::Tensor& packed);
  const at::Tensor& parameter_of(const Slot& slot) const;

  std::vector<FlatSegment>& segments_;
  const at::ScalarType reduce_dtype_;
  std::vector<Slot> slots_;
  bool is_reduced_ = false;
  at::Tensor packed_;  // during a reduction
  // The sum of this rank's shards, and after them of the notes; after the reduction where shards
  // rest.
  at::Tensor sum_;
  CopyEnd copied_;    // of the sum, to the host
  at::Tensor notes_;  // of the last sum, on the CPU
  int64_t number_ = 0;
  ScaledGradients scaled_;
  uint64_t written_ = 0;        // a hash of what forward wrote since the last reduction; 0: nothing
  int64_t reduced_writes_ = 0;  // 16 bits of it, as the reduction carries it
  c10::intrusive_ptr<c10d::Work> reduction_;
};

}  // namespace ddp
