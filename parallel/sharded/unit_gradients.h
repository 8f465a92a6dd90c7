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

    /// The number of ranks that have gradients.
    int64_t ranks() const;
    /// Whether a stream of the device waits for sums there, and not the host.
    bool wait_on_stream(c10::Device device) const;
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
  /// \param packed  memory; free again after finish_packed().
  ///
  /// Collective: yes. Blocks: no.
  void reduce(const Groups& groups, at::Tensor packed);
  /// This rank's notes of the last reduction.
  const UnitNotes& notes() const { return notes_; }
  /// Waits until the packed gradients are read, and starts to sum over the ranks with the same
  /// shards, unless that has begun.
  void finish_packed(const Groups& groups);
  /// Waits for the sum. Where shards rest on the host, begins to copy it there.
  void finish_reduction(const Groups& groups);
  int64_t reduced_bytes() const;

  /// Notes what forward wrote to the whole parameters.
  void note_writes(uint64_t hash);
  /// Ends the pass: adds the sums to `.grad`.
  ///
  /// \param has_gradient  by parameter: whether a rank gave one.
  void add_to_shards(const std::vector<bool>& has_gradient);
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
  /// Elements of a gradient, by Slot, and their place in the packed ones.
  struct Piece {
    size_t slot;
    int64_t from, at, numel;
  };
  struct Range {
    int64_t at, numel;
  };
  void find_pieces();
  int64_t slice_numel() const;
  void pack(at::Tensor& packed);
  void sum_replicas(const Groups& groups);
  void end_sum(const Groups& groups);
  const at::Tensor& parameter_of(const Slot& slot) const;

  std::vector<FlatSegment>& segments_;
  const at::ScalarType reduce_dtype_;
  std::vector<Slot> slots_;
  bool is_reduced_ = false;
  std::vector<Piece> pieces_;
  std::vector<Range> padding_;  // of the packed gradients
  at::Tensor packed_;           // during a reduction
  at::Tensor sum_;              // of this rank's shards; after the reduction where shards rest
  CopyEnd copied_;              // of the sum, to the host
  ScaledGradients scaled_;
  uint64_t written_ = 0;  // as UnitNotes::writes, before the reduction
  UnitNotes notes_;
  /// How far the sum is: over shards, over replicas; or nothing is left but to wait for a copy.
  enum class Sum { None, OverShards, OverReplicas, Ended };
  Sum summing_ = Sum::None;
  c10::intrusive_ptr<c10d::Work> reduction_;
  c10::intrusive_ptr<c10d::Work> replica_sum_;
};

}  // namespace ddp
