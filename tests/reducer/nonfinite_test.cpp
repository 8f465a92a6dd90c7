// Gradients that are infinite or NaN: found before they are averaged, and named on every rank.
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <ddp/internal/reducer.h>
#include <torch/torch.h>

#include "reducer/buckets/bucket.h"
#include "reducer/gradients/finite_check.h"
#include "reducer/gradients/nonfinite_gradients.h"
#include "reducer/like_nccl.h"
#include "reducer/passes.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

constexpr auto kInfinity = std::numeric_limits<double>::infinity();
constexpr auto kNaN = std::numeric_limits<double>::quiet_NaN();

ReducerOptions finds() { return ReducerOptions().find_nonfinite(true).stats_every(0); }

/// The text that every rank throws in backward pass 2, in which rank 1's `bad` gets a gradient of
/// `value`; "" for none. Then runs a pass that has to succeed.
std::string error_with(
    const ReducerOptions& options, double value, const char* bad = "b", int64_t size = 3,
    at::ScalarType dtype = at::kFloat) {
  return error_of_all(2, [&](const Rank& self) {
    const auto a = parameter({size}, dtype);
    const auto b = parameter({size}, dtype);
    Reducer reducer({{"a", a}, {"b", b}}, self.group, options);
    const auto pass = [&](double of_a, double of_b) {
      a.mutable_grad().reset();
      b.mutable_grad().reset();
      reduced_backward(reducer, [&] { return at::real((a * of_a + b * of_b).sum()); });
    };
    pass(1, 1);
    const bool is_bad = self.rank == 1;
    std::string error;
    try {
      pass(is_bad && bad[0] == 'a' ? value : 1, is_bad && bad[0] == 'b' ? value : 1);
    } catch (const c10::Error& e) {
      error = e.what_without_backtrace();
    }
    pass(1, 3);
    TORCH_CHECK(at::equal(b.grad(), at::full({size}, 3, dtype)), "not averaged");
    TORCH_CHECK(error.empty(), error);
  });
}

}  // namespace

TEST_CASE("a gradient that is not finite is named on every rank", "[ranks][nonfinite]") {
  const auto value = GENERATE(as<double>(), kNaN, kInfinity, -kInfinity);
  CAPTURE(value);
  CHECK_THAT(
      error_with(finds(), value),
      ContainsText("expected finite gradients in backward pass 2, got inf or NaN, first for \"b\" "
                   "on rank 1 of 2") &&
          ContainsText("find_nonfinite_output()"));
  CHECK_THAT(error_with(finds(), value, "a"), ContainsText("first for \"a\" on rank 1 of 2"));
}

TEST_CASE("it is found in gradients of each kind, dtype and size", "[ranks][nonfinite]") {
  const auto found = ContainsText("first for \"b\" on rank 1 of 2");
  CHECK_THAT(error_with(finds().gradient_as_bucket_view(true), kNaN), found);
  CHECK_THAT(error_with(finds().find_unused_parameters(true), kNaN), found);
  CHECK_THAT(error_with(finds().static_graph(true), kNaN), found);
  CHECK_THAT(error_with(finds(), kInfinity, "b", 1 << 20), found);  // sent without a bucket
  const auto dtype = GENERATE(at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat);
  CHECK_THAT(error_with(finds(), kInfinity, "b", 1000, dtype), found);
}

TEST_CASE("large finite gradients are no false alarm", "[ranks][nonfinite]") {
  CHECK(error_with(finds(), std::numeric_limits<float>::max() / 4, "b", 4000).empty());
  CHECK(error_with(finds(), 65504 / 4, "b", 4000, at::kHalf).empty());
}

TEST_CASE("without the option nothing looks at gradients", "[ranks][nonfinite]") {
  CHECK(error_with(ReducerOptions(), kNaN).empty());
}

TEST_CASE("several gradients that are not finite are counted", "[ranks][nonfinite]") {
  const auto error = error_of_all(2, [](const Rank& self) {
    const auto a = parameter(), b = parameter();
    Reducer reducer({{"a", a}, {"b", b}}, self.group, finds());
    reduced_backward(reducer, [&] { return (a + b).sum() * kNaN; });
  });
  CHECK_THAT(error, ContainsText("and then for 1 more of 2 on every rank"));
}

TEST_CASE("rows of a sparse gradient are looked at", "[ranks][nonfinite]") {
  const auto error = error_of_all(2, over("gloo"), [](const Rank& self) {
    const auto table = parameter({5, 2});
    Reducer reducer({{"table", table, /*expect_sparse=*/true}}, self.group, finds());
    reduced_backward(reducer, [&] {
      const auto rows = torch::embedding(
          table, torch::tensor({1, 3}), /*padding_idx=*/-1, /*scale_grad_by_freq=*/false,
          /*sparse=*/true);
      return (rows * (self.rank == 0 ? kInfinity : 1)).sum();
    });
  });
  CHECK_THAT(error, ContainsText("first for \"table\" on rank 0 of 2"));
}

TEST_CASE("where the host runs ahead, the next pass throws", "[ranks][nonfinite]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    Trainer trainer(self, finds());
    for (int step = 1; step <= 2; ++step) trainer.step();
    trainer.a.mutable_grad().reset();
    trainer.b.mutable_grad().reset();
    trainer.companion.count.begin();
    reduced_backward(trainer.reducer, [&] {
      return (trainer.a * (self.rank == 1 ? kNaN : 1.0)).sum() + trainer.b.sum();
    });
    const auto error = trainer.step();
    TORCH_CHECK(error.empty(), error);
  });
  CHECK(errors[0] == errors[1]);
  CHECK_THAT(errors[0], ContainsText("in backward pass 3") && ContainsText("\"a\" on rank 1 of 2"));
}

TEST_CASE("a device finds the gradients without the host", "[pure][nonfinite]") {
  const auto a = parameter({4}), b = parameter({2, 2}), c = parameter({3});
  const std::vector<NamedParameter> parameters{{"a", a}, {"b", b}, {"c", c}};
  const auto result = [&](double of_b, double of_c) {
    a.mutable_grad() = at::full({4}, std::numeric_limits<float>::max());
    b.mutable_grad() = at::full({2, 2}, of_b);
    c.mutable_grad() = at::full({3}, of_c);
    NonfiniteGradients search;
    const auto allocate = [](int64_t numel, const at::TensorOptions& options) {
      return at::zeros({numel}, options);
    };
    for (const auto& indices : std::vector<std::vector<size_t>>{{2, 1}, {0}}) {
      Bucket bucket(parameters, indices, /*tail=*/0, make_copied_gradients(), allocate, nullptr);
      bucket.pack(1.0);
      search.search(bucket, nullptr);
    }
    const auto flag = search.device_flag(at::zeros({5}));
    const auto problem = search.problem(7, parameters);
    CHECK(flag.item<float>() == (problem ? 1 : 0));
    return problem ? problem->what : "";
  };
  CHECK(result(1, 2).empty());
  CHECK_THAT(result(kNaN, 1), ContainsText("pass 7") && ContainsText("first for \"b\""));
  CHECK_THAT(result(kInfinity, -kInfinity), ContainsText("first for \"c\" and then for 1 more"));
}

TEST_CASE("a device finds sparse gradients by their values", "[pure][nonfinite]") {
  const auto table = parameter({4, 2});
  const std::vector<NamedParameter> parameters{{"table", table, /*expect_sparse=*/true}};
  for (const double value : {1.0, kNaN}) {
    table.mutable_grad() = at::sparse_coo_tensor(
        at::tensor({1, 3}, at::kLong).view({1, 2}), at::full({2, 2}, value, at::kFloat), {4, 2});
    const auto allocate = [](int64_t numel, const at::TensorOptions& options) {
      return at::zeros({numel}, options);
    };
    Bucket bucket(parameters, {0}, /*tail=*/0, make_copied_gradients(), allocate, nullptr);
    bucket.pack(1.0);
    NonfiniteGradients search;
    search.search(bucket, nullptr);
    CHECK(search.problem(1, parameters).has_value() == std::isnan(value));
  }
}

TEST_CASE("each number of a tensor is looked at", "[pure][nonfinite]") {
  const auto dtype = GENERATE(at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kFloat8_e5m2);
  for (const int64_t size : {1, 255, 256, 257, 70000}) {
    const auto numbers = at::full({size}, 3.0, at::kFloat).to(dtype);
    FiniteCheck check;
    check.look(numbers);
    CHECK_FALSE(check.take_failed());
    for (const int64_t place : {int64_t{0}, size / 2, size - 1}) {
      auto bad = at::full({size}, 3.0, at::kFloat);
      bad[place] = kInfinity;
      check.look(bad.to(dtype));
      CHECK(check.take_failed());
    }
  }
}

}  // namespace ddp
