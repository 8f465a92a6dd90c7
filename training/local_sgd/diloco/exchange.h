#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ddp/diloco.h>
#include <ddp/process_group.h>

namespace ddp {

/// How the regions find the mean of a fragment.
///
/// Two regions gather each other's bytes. With more, region k gets slice k of all, adds them up in
/// the order of regions, and sends the encoded mean to the others, so that the bytes do not grow
/// with their number. All ranks decode the same bytes: the mean has the same bits everywhere.
class Exchange {
 public:
  Exchange(Wire wire, int64_t regions) : wire_(wire), regions_(regions) {}

  /// This region's part of an exchange of `values` (1-D, float32): [parts, bytes of a part].
  at::Tensor encode_own(const at::Tensor& values) const;
  /// The values that the others see for what encode_own() made.
  at::Tensor decode_own(const at::Tensor& own, int64_t elements) const;

  /// Exchanges what encode_own() made of `elements` values; returns their mean over the regions.
  ///
  /// Collective: over the leaders. Blocks: host.
  at::Tensor run(const at::Tensor& own, int64_t elements, const ProcessGroup& leaders) const;

  /// What a leader sends in one run.
  int64_t bytes_sent(int64_t elements) const;

 private:
  bool is_cut() const { return regions_ > 2; }
  int64_t part_elements(int64_t elements) const;

  const Wire wire_;
  const int64_t regions_;
};

}  // namespace ddp
