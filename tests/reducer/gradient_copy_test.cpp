#include "reducer/gradient_copy.h"

#include <torch/torch.h>

#include "support/catch.h"

namespace ddp {
namespace {

// A tensor of random values in one of several memory layouts.
at::Tensor random_tensor(const std::string& layout, at::ScalarType dtype) {
  const auto t = torch::randn({4, 6, 5, 3}, at::kDouble).to(dtype);
  if (layout == "contiguous") return t;
  if (layout == "channels last") return t.contiguous(at::MemoryFormat::ChannelsLast);
  if (layout == "transposed") return t.transpose(0, 2);
  return torch::randn({4, 6, 5, 6}, at::kDouble).to(dtype).slice(3, 0, 6, 2);  // with gaps
}

}  // namespace

TEST_CASE("scaled copies have the bits of at::mul_out", "[pure][gradient_copy]") {
  const auto dtype = GENERATE(at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat);
  const std::string to = GENERATE("contiguous", "channels last", "transposed", "gaps");
  const std::string from = GENERATE("contiguous", "channels last", "transposed", "gaps");
  const double scale = GENERATE(1.0, 1.0 / 3);
  CAPTURE(dtype, to, from, scale);
  torch::manual_seed(1);
  auto dst = random_tensor(to, dtype);
  const auto src = random_tensor(from, dtype).reshape(dst.sizes());
  const auto expected = scale == 1.0 ? src.clone() : src.mul(scale);

  copy_scaled(dst, src, scale);
  CHECK(torch::equal(dst, expected));
}

TEST_CASE("scaled copies of any size, in parallel too", "[pure][gradient_copy]") {
  const int64_t size = GENERATE(0, 1, 7, 32768, 100003);
  const auto src = torch::randn({size});
  auto dst = torch::empty({size});
  copy_scaled(dst, src, 1.0);
  CHECK(torch::equal(dst, src));
  copy_scaled(dst, src, 0.3);
  CHECK(torch::equal(dst, src * 0.3));
  scale_in_place(dst, 0.7);
  CHECK(torch::equal(dst, src * 0.3 * 0.7));
}

TEST_CASE("a conjugate view is copied by value", "[pure][gradient_copy]") {
  const auto src = torch::randn({5}, at::kComplexFloat).conj();
  auto dst = torch::empty({5}, at::kComplexFloat);
  copy_scaled(dst, src, 1.0);
  CHECK(torch::equal(dst, src.resolve_conj()));
}

}  // namespace ddp
