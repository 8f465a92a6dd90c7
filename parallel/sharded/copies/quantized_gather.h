// Gathers of shards in one byte a value, with a scale for each block of values.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ddp/internal/quantized_rows.h>
#include <ddp/process_group.h>

namespace ddp {

/// Values of a block that has a scale. Shards begin where blocks do, so that the values do not
/// depend on the number of ranks.
constexpr int64_t kGatherBlock = 256;

/// Gathers what a shard's values become as integers of 8 bits: on all ranks the same, on the one
/// that has the shard as well. A block with a value that is not finite becomes NaN.
///
/// Source: ZeRO++ (Wang et al. 2023), quantized weights.
class QuantizedGather {
 public:
  /// \param shard_numel  a multiple of kGatherBlock.
  QuantizedGather(ProcessGroup group, int64_t shard_numel);

  /// Collective: yes. Blocks: no.
  ///
  /// \param shard  1-D, floating.
  void begin(const at::Tensor& shard);
  /// Fills the whole, of any floating dtype. The current stream waits for the gather.
  void end(const at::Tensor& whole);
  bool is_on_its_way() const { return all_.defined(); }

  /// Whether the last gather was of this kind; until forget().
  bool is_used() const { return own_.defined(); }
  /// This rank's values as the gather made them.
  at::Tensor own_values(at::ScalarType dtype) const;
  void forget();
  /// The bytes that the ranks get, with a row from each.
  int64_t bytes() const { return row_.bytes() * group_->getSize(); }

 private:
  ProcessGroup group_;
  RowLayout row_;         // of one rank
  at::Tensor own_, all_;  // rows
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace ddp
