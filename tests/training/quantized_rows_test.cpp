// Values in one byte each: what the bytes are, and what they stand for.
#include <ddp/internal/quantized_rows.h>

#include <algorithm>
#include <limits>

#include <torch/torch.h>

#include "support/compare.h"
#include "support/nets.h"

#include "support/catch.h"

namespace {

using namespace ddp::testing;

/// Of fp8: all finite numbers, in their order.
at::Tensor numbers_of(at::ScalarType dtype) {
  const auto all = torch::arange(256).to(torch::kByte).view(dtype).to(torch::kFloat);
  return std::get<0>(all.masked_select(all.isfinite()).sort());
}

}  // namespace

TEST_CASE("loops of the CPU encode to the bytes of LibTorch's operations", "[int8][pure]") {
  const int64_t block = GENERATE(0, 1, 5, 256);
  const auto dtype = GENERATE(at::kByte, at::kFloat8_e4m3fn, at::kFloat8_e5m2);
  const bool has_zero_points = GENERATE(false, true);
  if (has_zero_points && dtype != at::kByte) return;
  const bool keeps_error = GENERATE(false, true);
  for (const int64_t values : {1, 7, 256, 1000, 5000}) {
    for (const int64_t rows : {1, 3}) {
      const ddp::RowLayout layout(values, rows, block, has_zero_points, dtype);
      REQUIRE(layout.bytes() % 4 == 0);
      auto x = draw_values({values}, 3, torch::kFloat);
      if (values == 256) x.zero_();
      if (values == 1000) x.mul_(1e-44);
      if (values == 5000) {
        x[10] = std::numeric_limits<float>::infinity(), x[2000] = NAN,
        x[2001] = -std::numeric_limits<float>::infinity();
        x.narrow(0, 700, 600).zero_();
      }
      CAPTURE(block, dtype, has_zero_points, values, rows);
      ddp::EncodeOptions options;
      options.feedback = draw_values({values}, 4, torch::kFloat) * 0.01;
      options.keeps_error = keeps_error;
      options.is_one_range = has_zero_points && block == 0;
      auto fast = x.clone(), slow = x.clone();
      const auto bytes = ddp::encode_rows(fast, rows, layout, options);
      const auto other = ddp::by_operations::encode_rows(slow, rows, layout, options);
      REQUIRE(bytes.sizes() == other.sizes());
      // NaN may be any of its bits.
      if (values != 5000) CHECK(torch::equal(bytes, other));
      auto of_other = torch::empty_like(x);
      ddp::decode_rows(other, layout, of_other);
      const auto is_finite = fast.isfinite();
      CHECK(torch::allclose(fast.where(is_finite, 0), slow.where(is_finite, 0), 0, 1e-7));
      CHECK_FALSE(slow.isfinite().logical_and(~is_finite).any().item<bool>());
      CHECK(torch::allclose(
          ddp::mean_of_rows(bytes, layout), ddp::by_operations::mean_of_rows(bytes, layout), 1e-6,
          0, /*equal_nan=*/true));
      auto kept = torch::empty_like(x);
      ddp::decode_rows(bytes, layout, fast, kept);
      ddp::by_operations::decode_rows(bytes, layout, slow);
      CHECK(torch::allclose(fast, slow, 0, 0, /*equal_nan=*/true));
      CHECK(torch::allclose(fast, of_other, 0, 0, /*equal_nan=*/true));
    }
  }
}

TEST_CASE("a value is rounded by at most half of its block's step", "[int8][pure]") {
  const auto x = draw_values({1000}, 1, torch::kFloat);
  x.narrow(0, 512, 256).zero_();
  const ddp::RowLayout layout(1000, 1, 256, /*has_zero_points=*/false);
  CHECK(layout.bytes() == 1000 + 4 * 4);
  auto error = x.clone();
  ddp::EncodeOptions options;
  options.keeps_error = true;
  const auto bytes = ddp::encode_rows(error, 1, layout, options);
  auto decoded = torch::empty_like(x);
  ddp::decode_rows(bytes, layout, decoded);
  for (int64_t from = 0; from < 1000; from += 256) {
    const int64_t count = std::min<int64_t>(256, 1000 - from);
    const auto largest = x.narrow(0, from, count).abs().max().item<double>();
    CHECK(
        difference(x.narrow(0, from, count), decoded.narrow(0, from, count)) <=
        largest / 127 / 2 * 1.0001);
  }
  CHECK(torch::equal(decoded.narrow(0, 512, 256), torch::zeros({256})));
  CHECK(difference(decoded + error, x) < 1e-6);
}

TEST_CASE("bytes of fp8 are those of LibTorch's conversions", "[int8][pure]") {
  const auto dtype = GENERATE(at::kFloat8_e4m3fn, at::kFloat8_e5m2);
  const auto numbers = numbers_of(dtype);
  const auto most = numbers.max();
  CHECK(most.item<double>() == (dtype == at::kFloat8_e4m3fn ? 448 : 57344));
  // Each number, what is between two, and next to that, above and below; many others; and what is
  // rounded to 0. The largest magnitude makes the scale 1.
  const int64_t gaps = numbers.numel() - 1;
  const auto middle = (numbers.narrow(0, 0, gaps) + numbers.narrow(0, 1, gaps)) / 2;
  const auto drawn = draw_values({20000}, 5, torch::kFloat);
  const auto wide = (drawn * (drawn.roll(1) * 4).exp()).clamp(-most, most);
  const auto x = torch::cat(
      {numbers, middle, middle.nextafter(most), middle.nextafter(-most), wide,
       torch::tensor({-0.0F, 1e-45F, -1e-40F, 1e-7F})});
  const auto expected = x.to(dtype);
  const ddp::RowLayout layout(x.numel(), 1, 0, /*has_zero_points=*/false, dtype);
  const auto bytes = ddp::encode_rows(x.clone(), 1, layout, {});
  CHECK(bytes.narrow(1, 0, 4).contiguous().view(torch::kFloat).item<float>() == 1);
  CHECK(torch::equal(bytes[0].narrow(0, 4, x.numel()), expected.view(torch::kByte)));
  auto decoded = torch::empty_like(x);
  ddp::decode_rows(bytes, layout, decoded);
  CHECK(torch::equal(decoded, expected.to(torch::kFloat)));
  // With another scale: a multiple of 448 or 57344 that is exact.
  auto error = x * 0.375, scaled = torch::empty_like(x);
  const auto kept = error.clone();
  ddp::EncodeOptions options;
  options.keeps_error = true;
  ddp::decode_rows(ddp::encode_rows(error, 1, layout, options), layout, scaled);
  CHECK(torch::equal(scaled, (kept / 0.375F).to(dtype).to(torch::kFloat) * 0.375));
  CHECK(torch::equal(error, kept - scaled));
}

TEST_CASE("fp8 rounds a value by a part of itself", "[int8][pure]") {
  const auto dtype = GENERATE(at::kFloat8_e4m3fn, at::kFloat8_e5m2);
  const auto x = draw_values({512}, 1, torch::kFloat) + 2;
  x[0] = 3000;  // of integers, steps are of 24
  const ddp::RowLayout layout(512, 1, 512, /*has_zero_points=*/false, dtype);
  auto decoded = torch::empty_like(x);
  ddp::decode_rows(ddp::encode_rows(x.clone(), 1, layout, {}), layout, decoded);
  const auto relative = ((decoded - x) / x).abs().max().item<double>();
  const double half_of_a_unit = dtype == at::kFloat8_e4m3fn ? 1.0 / 16 : 1.0 / 8;
  CHECK(relative <= half_of_a_unit * 1.0001);
  CHECK(relative > half_of_a_unit / 2);
}

// Below float's least normal number, a scale has few bits, and a value may be above its range.
TEST_CASE("blocks of the smallest floats stay in their range", "[int8][pure]") {
  const auto dtype = GENERATE(at::kByte, at::kFloat8_e4m3fn, at::kFloat8_e5m2);
  for (const int64_t units : {1, 100, 190, 600, 671, 672, 80000, 86015, 90000}) {
    auto x = torch::zeros({4});
    x[1] = static_cast<double>(units) * std::numeric_limits<float>::denorm_min();
    const ddp::RowLayout layout(4, 1, 4, /*has_zero_points=*/false, dtype);
    const auto bytes = ddp::encode_rows(x.clone(), 1, layout, {});
    CAPTURE(dtype, units);
    CHECK(torch::equal(bytes, ddp::by_operations::encode_rows(x.clone(), 1, layout, {})));
    auto decoded = torch::empty_like(x), slow = torch::empty_like(x);
    ddp::decode_rows(bytes, layout, decoded);
    ddp::by_operations::decode_rows(bytes, layout, slow);
    CHECK(torch::equal(decoded, slow));
    CHECK(decoded.isfinite().all().item<bool>());
  }
}
