// Values in one byte each, with a scale for each block of them, cut into a row for each rank.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace ddp {

/// A row in memory: the scales of its blocks as floats, with `has_zero_points` their zero
/// points as floats, and then a byte a value. Blocks begin anew in every row.
///
/// A value is scale * (byte - zero point). Without zero points that is 128, and bytes are 1 to 255.
/// With a `dtype` of fp8 a value is scale * number, and the byte has the number's bits.
struct RowLayout {
  /// The layout that cuts `values` into `rows`.
  ///
  /// \param block  0: a row is one block.
  /// \param dtype  kByte, or kFloat8_e4m3fn or kFloat8_e5m2 without zero points.
  RowLayout(
      int64_t values, int64_t rows, int64_t block, bool has_zero_points,
      at::ScalarType dtype = at::kByte);

  int64_t blocks() const { return (share + block - 1) / block; }
  int64_t floats() const { return blocks() * (has_zero_points ? 2 : 1); }
  int64_t bytes() const { return kFloatBytes * floats() + share; }
  bool is_float() const { return dtype != at::kByte; }
  /// The largest number of a byte, in magnitude, without zero points.
  float largest() const;
  /// The byte of 0, without zero points.
  float middle() const { return is_float() ? 0 : 128; }

  static constexpr int64_t kFloatBytes = 4;

  int64_t share;  ///< values of a row; a multiple of 4, so that the next row's scales are aligned
  int64_t block;  ///< values that have a scale in common
  bool has_zero_points;
  at::ScalarType dtype;
};

struct EncodeOptions {
  /// Added to the values first, float as they are; undefined: nothing.
  at::Tensor feedback = {};
  /// Whether the values become what their encoding lost.
  bool keeps_error = false;
  /// With zero points: whether all values have one scale and zero point in common, not each block.
  bool is_one_range = false;
};

/// Encodes values; those after the last are 0.
///
/// A block with a value that is not finite is decoded to NaN.
///
/// \param values  [n] float, contiguous. Becomes the error with `keeps_error`; with `feedback`
/// alone
///         their sum.
/// \return  [rows, layout.bytes()] bytes, on the device of `values`.
///
/// Cost: on CPUs one pass over the memory.
at::Tensor encode_rows(
    const at::Tensor& values, int64_t rows, const RowLayout& layout, const EncodeOptions& options);

/// The mean of rows, added up in their order.
///
/// \return  [layout.share] float.
at::Tensor mean_of_rows(const at::Tensor& bytes, const RowLayout& layout);

/// Whether all that rows decode to is finite in `dtype`.
///
/// \return  a bool without dimensions, on the device of the bytes.
at::Tensor are_rows_finite(const at::Tensor& bytes, const RowLayout& layout, at::ScalarType dtype);

/// Decodes the rows one after another into `values`, [n] float, whose previous values become
/// `previous` where that is defined.
void decode_rows(
    const at::Tensor& bytes, const RowLayout& layout, const at::Tensor& values,
    const at::Tensor& previous = {});

/// The same by operations of LibTorch, for all devices; encode_rows() and the others have loops of
/// their own for the CPU.
namespace by_operations {
at::Tensor encode_rows(
    const at::Tensor& values, int64_t rows, const RowLayout& layout, const EncodeOptions& options);
at::Tensor mean_of_rows(const at::Tensor& bytes, const RowLayout& layout);
void decode_rows(
    const at::Tensor& bytes, const RowLayout& layout, const at::Tensor& values,
    const at::Tensor& previous = {});
}  // namespace by_operations

}  // namespace ddp
