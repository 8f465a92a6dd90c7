#include <vector>

#include <ATen/ATen.h>

#include "comm/backends/shm/backend/reduce.h"

#include "support/catch.h"

using c10d::ReduceOp;
using ddp::backends::shm::can_reduce;
using ddp::backends::shm::reduce_elements;

namespace {

std::byte* data_of(const at::Tensor& t) { return static_cast<std::byte*>(t.mutable_data_ptr()); }

at::Tensor combined(ReduceOp::RedOpType op, const at::Tensor& a, const at::Tensor& b) {
  switch (op) {
    case ReduceOp::SUM:
      return a + b;
    case ReduceOp::PRODUCT:
      return a * b;
    case ReduceOp::MIN:
      return at::minimum(a, b);
    case ReduceOp::MAX:
      return at::maximum(a, b);
    case ReduceOp::BAND:
      return at::bitwise_and(a, b);
    case ReduceOp::BOR:
      return at::bitwise_or(a, b);
    default:
      return at::bitwise_xor(a, b);
  }
}

// The result of torch's own operations, one source after the other, half precisions as float.
at::Tensor expected(ReduceOp::RedOpType op, const std::vector<at::Tensor>& sources) {
  const auto type = sources[0].scalar_type();
  const bool half = type == at::kHalf || type == at::kBFloat16;
  at::Tensor result = half ? sources[0].to(at::kFloat) : sources[0];
  for (size_t i = 1; i < sources.size(); ++i) {
    result = combined(op, result, half ? sources[i].to(at::kFloat) : sources[i]);
  }
  return result.to(type);
}

}  // namespace

TEST_CASE("elements are combined as torch combines them, in rank order", "[shm][pure]") {
  at::manual_seed(1);
  for (const auto type :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar, at::kByte, at::kInt,
        at::kLong}) {
    for (const auto op :
         {ReduceOp::SUM, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX, ReduceOp::BAND,
          ReduceOp::BOR, ReduceOp::BXOR}) {
      if (!can_reduce(type, ReduceOp(op))) continue;
      for (const int ranks : {2, 3, 5}) {
        CAPTURE(type, static_cast<int>(op), ranks);
        constexpr int64_t kSize = 5003;  // some blocks and a rest
        std::vector<at::Tensor> sources;
        std::vector<const std::byte*> from;
        for (int rank = 0; rank < ranks; ++rank) {
          sources.push_back(
              at::isFloatingType(type) ? at::randn(kSize).to(type)
                                       : at::randint(0, 100, {kSize}).to(type));
          from.push_back(data_of(sources.back()));
        }
        auto first = at::zeros(kSize, at::dtype(type));
        auto second = at::zeros(kSize, at::dtype(type));
        reduce_elements(type, ReduceOp(op), from, {data_of(first), data_of(second)}, 3, 4999);
        const auto middle = [](const at::Tensor& t) { return t.narrow(0, 3, 4996); };
        CHECK(at::equal(middle(first), middle(expected(op, sources))));
        CHECK(at::equal(first, second));
        CHECK(first.narrow(0, 0, 3).eq(0).all().item<bool>());
        CHECK(first.narrow(0, 4999, 4).eq(0).all().item<bool>());
      }
    }
  }
}

TEST_CASE("a destination may be a source", "[shm][pure]") {
  auto a = at::arange(3000, at::kFloat);
  auto b = at::ones(3000);
  reduce_elements(
      at::kFloat, ReduceOp(ReduceOp::SUM), {data_of(a), data_of(b)}, {data_of(a), data_of(b)}, 0,
      3000);
  CHECK(at::equal(a, at::arange(3000, at::kFloat) + 1));
  CHECK(at::equal(a, b));
}

TEST_CASE("an average is the sum of divided parts, to the bit", "[shm][pure]") {
  const auto type = GENERATE(at::kFloat, at::kDouble);
  constexpr int64_t kCount = 5000;
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < 3; ++rank) parts.push_back(at::randn({kCount}, type));
  const auto share = type == at::kFloat ? at::tensor(1.0F / 3, type) : at::tensor(1.0 / 3, type);
  const auto expected = parts[0] * share + parts[1] * share + parts[2] * share;
  const auto result = at::empty({kCount}, type);
  reduce_elements(
      type, ReduceOp(ReduceOp::AVG), {data_of(parts[0]), data_of(parts[1]), data_of(parts[2])},
      {data_of(result)}, 0, kCount);
  CHECK(at::equal(result, expected));
}

TEST_CASE("an average does not overflow where the sum would", "[shm][pure]") {
  const auto type = GENERATE(at::kFloat, at::kHalf, at::kBFloat16);
  const double large = type == at::kHalf ? 60000 : 3e38;
  const auto a = at::full({3000}, large, type);
  const auto b = at::full({3000}, large, type);
  const auto result = at::empty({3000}, type);
  reduce_elements(
      type, ReduceOp(ReduceOp::AVG), {data_of(a), data_of(b)}, {data_of(result)}, 0, 3000);
  CHECK(at::equal(result, a));
}

TEST_CASE("a NaN stays a NaN in minima and maxima", "[shm][pure]") {
  for (const auto op : {ReduceOp::MIN, ReduceOp::MAX}) {
    auto a = at::tensor({NAN, 1.0F});
    auto b = at::tensor({1.0F, NAN});
    reduce_elements(at::kFloat, ReduceOp(op), {data_of(a), data_of(b)}, {data_of(a)}, 0, 2);
    CHECK(a.isnan().all().item<bool>());
  }
}

TEST_CASE("can_reduce is false for operations without a meaning or a kernel", "[shm][pure]") {
  CHECK_FALSE(can_reduce(at::kFloat, ReduceOp(ReduceOp::BAND)));
  CHECK_FALSE(can_reduce(at::kInt, ReduceOp(ReduceOp::AVG)));
  CHECK_FALSE(can_reduce(at::kComplexFloat, ReduceOp(ReduceOp::SUM)));
  CHECK_FALSE(can_reduce(at::kBool, ReduceOp(ReduceOp::SUM)));
}
