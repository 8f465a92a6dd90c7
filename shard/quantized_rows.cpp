#include <ddp/internal/quantized_rows.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/ceil_div.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>

#include "byte_codes.h"

namespace ddp {
namespace {

constexpr float kLevels = 255;  // between the least and the largest byte

struct Range {
  // The range of a block's values: NaN where one of them is NaN.
  static Range of(const float* values, int64_t count, const RowLayout& layout) {
    return layout.has_zero_points ? with_zero_point(values, count)
                                  : symmetric(values, count, layout);
  }

  static Range symmetric(const float* values, int64_t count, const RowLayout& layout) {
    // As integers, magnitudes are in the same order, infinity is above them, and NaN is largest.
    int32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) {
      largest = std::max(largest, static_cast<int32_t>(bits_of(values[i]) & 0x7fffffffU));
    }
    const float most = layout.largest();
    return {float_of(static_cast<uint32_t>(largest)) / most, layout.middle(), -most, most};
  }

  static Range with_zero_point(const float* values, int64_t count) {
    float low = 0, high = 0;
    bool has_nan = false;
    for (int64_t i = 0; i < count; ++i) {
      low = std::min(low, values[i]);  // passes over NaN
      high = std::max(high, values[i]);
      has_nan |= values[i] != values[i];
    }
    return between(low, has_nan ? std::numeric_limits<float>::quiet_NaN() : high);
  }

  // The rule of Python's MinMaxObserver, but for its least scale of 1.19e-7, under which gradients
  // would become 0.
  static Range between(float low, float high) {
    const float scale = (high - low) / kLevels;
    if (!std::isfinite(scale)) return {scale, 0, 0, kLevels};
    const float zero =
        std::min(std::max(0 - std::nearbyint(low / (scale == 0 ? 1 : scale)), 0.0F), kLevels);
    return {scale, zero, 0 - zero, kLevels - zero};
  }

  float scale;
  float zero;
  float least;  // of the numbers that bytes stand for
  float most;
};

struct Row {
  Row(uint8_t* memory, const RowLayout& layout)
      : scales(reinterpret_cast<float*>(memory)),
        zeros(layout.has_zero_points ? scales + layout.blocks() : nullptr),
        bytes(memory + RowLayout::kFloatBytes * layout.floats()),
        middle(layout.middle()) {}

  float zero_of(int64_t block) const { return zeros ? zeros[block] : middle; }

  float* scales;
  float* zeros;
  uint8_t* bytes;
  float middle;
};

Row row_of(const at::Tensor& bytes, int64_t row, const RowLayout& layout) {
  return {static_cast<uint8_t*>(bytes.data_ptr()) + row * layout.bytes(), layout};
}

// Calls `visit(row, block, from, count)` for each block that has values; `from` counts all values.
template <typename Visit>
void for_each_block(int64_t rows, int64_t values, const RowLayout& layout, Visit visit) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t block = 0; block < layout.blocks(); ++block) {
      const int64_t from = row * layout.share + block * layout.block;
      const int64_t end = std::min({(row + 1) * layout.share, from + layout.block, values});
      visit(row, block, from, std::max(end - from, int64_t{0}));
    }
  }
}

// Calls `visit` with the code of a block's bytes.
template <typename Visit>
void with_code(const RowLayout& layout, const IntegerCode& integers, const Visit& visit) {
  if (layout.dtype == at::kFloat8_e4m3fn) return visit(E4m3Code());
  if (layout.dtype == at::kFloat8_e5m2) return visit(E5m2Code());
  visit(integers);
}

template <typename Code>
void encode_block(
    const Code& code, float scale, float* values, int64_t count, uint8_t* bytes, bool keeps_error) {
  const float divisor = scale == 0 ? 1 : scale;
  if (!keeps_error) {
    for (int64_t i = 0; i < count; ++i) bytes[i] = code.byte_of(code.rounded(values[i] / divisor));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float number = code.rounded(values[i] / divisor);
    bytes[i] = code.byte_of(number);
    values[i] -= number * scale;
  }
}

// [rows, share] as [rows, blocks, block], with zeros where a block is not full.
at::Tensor in_blocks(const at::Tensor& rows, const RowLayout& layout) {
  const int64_t blocks = layout.blocks();
  const int64_t missing = blocks * layout.block - layout.share;
  return at::constant_pad_nd(rows, {0, missing}).view({rows.size(0), blocks, layout.block});
}

at::Tensor in_rows(const at::Tensor& blocks, const RowLayout& layout) {
  return blocks.flatten(1).narrow(1, 0, layout.share);
}

struct Header {
  at::Tensor scales;  // [rows, blocks, 1]
  at::Tensor zeros;
};

Header header_of(const at::Tensor& bytes, const RowLayout& layout) {
  const auto floats = bytes.narrow(1, 0, RowLayout::kFloatBytes * layout.floats())
                          .contiguous()
                          .view(at::kFloat)
                          .unsqueeze(2);
  const int64_t blocks = layout.blocks();
  const auto scales = floats.narrow(1, 0, blocks);
  if (!layout.has_zero_points) return {scales, at::full({}, layout.middle(), floats.options())};
  return {scales, floats.narrow(1, blocks, blocks)};
}

Header header_for(const at::Tensor& blocks, const RowLayout& layout, bool is_one_range) {
  if (!layout.has_zero_points) {
    const auto scales = blocks.abs().amax(2, /*keepdim=*/true).div_(layout.largest());
    return {scales, at::full({}, layout.middle(), blocks.options())};
  }
  auto low = blocks.amin(2, /*keepdim=*/true).clamp_max_(0);
  auto high = blocks.amax(2, /*keepdim=*/true).clamp_min_(0);
  if (is_one_range) {
    low = low.min().expand_as(low);
    high = high.max().expand_as(high);
  }
  const auto scales = (high - low).div_(kLevels);
  // 0 minus a number, as -0 has other bits.
  const auto zeros = (0 - low.div(scales.masked_fill(scales == 0, 1)).round_()).clamp_(0, kLevels);
  return {scales, zeros.masked_fill_(scales.isfinite().logical_not_(), 0)};
}

}  // namespace

RowLayout::RowLayout(
    int64_t values, int64_t rows, int64_t block, bool has_zero_points, at::ScalarType dtype)
    : has_zero_points(has_zero_points), dtype(dtype) {
  share = at::round_up(at::ceil_div(values, rows), kFloatBytes);
  this->block = block == 0 ? share : std::min(block, share);
}

float RowLayout::largest() const {
  if (dtype == at::kFloat8_e4m3fn) return E4m3Code::kMost;
  if (dtype == at::kFloat8_e5m2) return E5m2Code::kMost;
  return 127;
}

at::Tensor encode_rows(
    const at::Tensor& values, int64_t rows, const RowLayout& layout, const EncodeOptions& options) {
  if (!values.is_cpu()) return by_operations::encode_rows(values, rows, layout, options);
  const auto bytes = at::empty({rows, layout.bytes()}, values.options().dtype(at::kByte));
  auto* const data = static_cast<float*>(values.data_ptr());
  const auto* const feedback = options.feedback.defined()
                                   ? static_cast<const float*>(options.feedback.const_data_ptr())
                                   : nullptr;
  const auto add = [&](int64_t from, int64_t count) {
    if (!feedback) return;
    for (int64_t i = from; i < from + count; ++i) data[i] += feedback[i];
  };
  if (options.is_one_range) add(0, values.numel());
  const auto whole = options.is_one_range ? Range::of(data, values.numel(), layout) : Range();
  for_each_block(
      rows, values.numel(), layout, [&](int64_t row, int64_t block, int64_t from, int64_t count) {
        auto* const block_values = data + from;
        if (!options.is_one_range) add(from, count);
        const auto range = options.is_one_range ? whole : Range::of(block_values, count, layout);
        const auto to = row_of(bytes, row, layout);
        to.scales[block] = range.scale;
        if (to.zeros) to.zeros[block] = range.zero;
        auto* const block_bytes = to.bytes + block * layout.block;
        if (!std::isfinite(range.scale)) {
          std::fill_n(block_bytes, count, static_cast<uint8_t>(range.zero));
          if (options.keeps_error) std::fill_n(block_values, count, range.scale);
        } else {
          with_code(layout, {range.zero, range.least, range.most}, [&](const auto& code) {
            encode_block(code, range.scale, block_values, count, block_bytes, options.keeps_error);
          });
        }
        // A receiver decodes a whole row.
        const int64_t room = std::min(layout.block, layout.share - block * layout.block);
        std::fill_n(block_bytes + count, room - count, static_cast<uint8_t>(range.zero));
      });
  return bytes;
}

at::Tensor mean_of_rows(const at::Tensor& bytes, const RowLayout& layout) {
  if (!bytes.is_cpu()) return by_operations::mean_of_rows(bytes, layout);
  const auto mean = at::empty({layout.share}, bytes.options().dtype(at::kFloat));
  auto* const sums = static_cast<float*>(mean.data_ptr());
  const int64_t rows = bytes.size(0);
  for_each_block(1, layout.share, layout, [&](int64_t, int64_t block, int64_t from, int64_t count) {
    auto* const sum = sums + from;
    std::fill_n(sum, count, 0.0F);
    for (int64_t r = 0; r < rows; ++r) {
      const auto row = row_of(bytes, r, layout);
      const float scale = row.scales[block];
      const auto* const from_row = row.bytes + from;
      with_code(layout, {row.zero_of(block)}, [&](const auto& code) {
        for (int64_t i = 0; i < count; ++i) sum[i] += code.number_of(from_row[i]) * scale;
      });
    }
    for (int64_t i = 0; i < count; ++i) sum[i] /= static_cast<float>(rows);
  });
  return mean;
}

at::Tensor are_rows_finite(const at::Tensor& bytes, const RowLayout& layout, at::ScalarType dtype) {
  const auto header = header_of(bytes, layout);
  const auto largest = layout.has_zero_points
                           ? header.scales * at::maximum(header.zeros, kLevels - header.zeros)
                           : header.scales * layout.largest();
  return largest.to(dtype).isfinite().all();
}

void decode_rows(
    const at::Tensor& bytes, const RowLayout& layout, const at::Tensor& values,
    const at::Tensor& previous) {
  if (!bytes.is_cpu()) {
    by_operations::decode_rows(bytes, layout, values, previous);
    return;
  }
  auto* const data = static_cast<float*>(values.data_ptr());
  auto* const kept = previous.defined() ? static_cast<float*>(previous.data_ptr()) : nullptr;
  for_each_block(
      bytes.size(0), values.numel(), layout,
      [&](int64_t row, int64_t block, int64_t from, int64_t count) {
        const auto source = row_of(bytes, row, layout);
        const float scale = source.scales[block];
        const auto* const block_bytes = source.bytes + block * layout.block;
        auto* const to = data + from;
        if (kept) std::copy_n(to, count, kept + from);
        with_code(layout, {source.zero_of(block)}, [&](const auto& code) {
          for (int64_t i = 0; i < count; ++i) to[i] = code.number_of(block_bytes[i]) * scale;
        });
      });
}

namespace by_operations {

at::Tensor encode_rows(
    const at::Tensor& values, int64_t rows, const RowLayout& layout, const EncodeOptions& options) {
  if (options.feedback.defined()) values.add_(options.feedback);
  const int64_t missing = rows * layout.share - values.numel();
  const auto blocks =
      in_blocks(at::constant_pad_nd(values, {0, missing}).view({rows, layout.share}), layout);
  const auto header = header_for(blocks, layout, options.is_one_range);
  const auto divisors = header.scales.masked_fill(header.scales == 0, 1);
  const auto numbers = blocks.div(divisors);
  at::Tensor bytes;
  if (layout.is_float()) {
    numbers.clamp_(-layout.largest(), layout.largest()).nan_to_num_(0);
    const auto floats = numbers.to(layout.dtype);
    numbers.copy_(floats);
    bytes = in_rows(floats.view(at::kByte), layout);
  } else {
    const float least = layout.has_zero_points ? 0 : layout.middle() - layout.largest();
    numbers.copy_(at::clamp(numbers, least - header.zeros, kLevels - header.zeros));
    numbers.round_().nan_to_num_(0);
    bytes = in_rows((numbers + header.zeros).to(at::kByte), layout);
  }
  if (options.keeps_error) {
    const auto decoded = in_rows(numbers.mul_(header.scales), layout).flatten();
    values.sub_(decoded.narrow(0, 0, values.numel()));
  }
  const auto as_bytes = [](const at::Tensor& floats) {
    return floats.squeeze(2).contiguous().view(at::kByte);
  };
  if (!layout.has_zero_points) return at::cat({as_bytes(header.scales), bytes}, 1);
  return at::cat({as_bytes(header.scales), as_bytes(header.zeros), bytes}, 1);
}

namespace {

// [rows, share]
at::Tensor decoded(const at::Tensor& bytes, const RowLayout& layout) {
  const auto header = header_of(bytes, layout);
  const auto codes = bytes.narrow(1, RowLayout::kFloatBytes * layout.floats(), layout.share);
  const auto numbers = in_blocks(codes.view(layout.dtype).to(at::kFloat), layout);
  return in_rows((numbers - header.zeros).mul_(header.scales), layout);
}

}  // namespace

at::Tensor mean_of_rows(const at::Tensor& bytes, const RowLayout& layout) {
  const auto sum = at::zeros({layout.share}, bytes.options().dtype(at::kFloat));
  for (int64_t row = 0; row < bytes.size(0); ++row) {
    sum.add_(decoded(bytes.narrow(0, row, 1), layout)[0]);
  }
  return sum.div_(static_cast<double>(bytes.size(0)));
}

void decode_rows(
    const at::Tensor& bytes, const RowLayout& layout, const at::Tensor& values,
    const at::Tensor& previous) {
  if (previous.defined()) previous.copy_(values);
  values.copy_(decoded(bytes, layout).flatten().narrow(0, 0, values.numel()));
}

}  // namespace by_operations
}  // namespace ddp
