#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/diloco.h>
#include <ddp/process_group.h>

namespace ddp {

/// Elements that have a scale in common, with DiLoCoWire::Int8.
constexpr int64_t kWireBlock = 256;

int64_t encoded_bytes(DiLoCoWire wire, int64_t elements);

/// \param values  1-D, float32, on the CPU.
/// \return encoded_bytes() bytes, 1-D. The same on every rank and in every build for equal values.
at::Tensor encode(DiLoCoWire wire, const at::Tensor& values);

/// Decodes `elements` values that encode() made. A value that was not finite is not finite here.
at::Tensor decode(DiLoCoWire wire, const at::Tensor& bytes, int64_t elements);

/// How the regions find the mean of a fragment.
///
/// Two regions gather each other's bytes. With more, region k gets slice k of all, adds them up in
/// the order of regions, and sends the encoded mean to the others, so that the bytes do not grow
/// with their number. All ranks decode the same bytes: the mean has the same bits everywhere.
class Exchange {
 public:
  Exchange(DiLoCoWire wire, int64_t regions) : wire_(wire), regions_(regions) {}

  /// Exchanges `values` (1-D, float32); returns their mean over the regions.
  ///
  /// \param counted  the regions whose values are in the mean, ascending; empty: all.
  ///
  /// Collective: over the leaders. Blocks: host.
  at::Tensor run(
      const at::Tensor& values, const ProcessGroup& leaders,
      const std::vector<int64_t>& counted = {}) const;

  /// The bytes that a leader sends in one run.
  int64_t bytes_sent(int64_t elements) const;

  /// Encodes and decodes `values`: the same for any number of regions.
  static at::Tensor as_sent(DiLoCoWire wire, const at::Tensor& values);

 private:
  bool is_cut() const { return regions_ > 2; }
  int64_t part_elements(int64_t elements) const;
  at::Tensor encode_parts(const at::Tensor& values) const;
  at::Tensor decode_parts(const at::Tensor& parts, int64_t elements) const;
  at::Tensor mean_of_rows(
      const at::Tensor& rows, int64_t elements, const std::vector<int64_t>& counted) const;

  const DiLoCoWire wire_;
  const int64_t regions_;
};

}  // namespace ddp
