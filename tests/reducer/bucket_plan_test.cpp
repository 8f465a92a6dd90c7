#include <ddp/internal/bucket_plan.h>

#include <random>

#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "support/catch.h"

namespace ddp {
namespace {

using Buckets = std::vector<std::vector<size_t>>;

ParameterExtent floats(int64_t count, bool sparse = false) {
  return {count * 4, at::kFloat, at::kCPU, sparse};
}
ParameterExtent doubles(int64_t count) { return {count * 8, at::kDouble, at::kCPU}; }

}  // namespace

TEST_CASE("the golden plans of torch 2.11", "[pure][bucket_plan]") {
  const std::vector<ParameterExtent> mixed{floats(50),  doubles(25), floats(50),
                                           doubles(25), floats(50),  doubles(25)};
  const std::vector<ParameterExtent> tens(4, floats(10));

  SECTION("a bucket closes when it reaches its cap, and keeps the parameter that crossed it") {
    const auto plan = plan_buckets({floats(100), floats(200), floats(100), floats(50)}, {400});
    CHECK(plan.buckets == Buckets{{0}, {1}, {2}, {3}});
    CHECK(
        plan_buckets({floats(5), floats(1000), floats(5)}, {100}).buckets == Buckets{{0, 1}, {2}});
  }
  SECTION("dtypes never mix") {
    CHECK(plan_buckets(mixed, {400}).buckets == Buckets{{0, 2}, {1, 3}, {4}, {5}});
  }
  SECTION("each dtype has its own sequence of caps; the last one repeats") {
    const auto plan = plan_buckets(mixed, {200, 400});
    CHECK(plan.buckets == Buckets{{0}, {1}, {2, 4}, {3, 5}});
    CHECK(plan.limits == std::vector<int64_t>{200, 200, 400, 400});
    const auto same_dtype = plan_buckets(tens, {40, 80});
    CHECK(same_dtype.buckets == Buckets{{0}, {1, 2}, {3}});
    CHECK(same_dtype.limits == std::vector<int64_t>{40, 80, 80});
  }
  SECTION("a sparse parameter has its own bucket and uses up no cap") {
    const auto plan =
        plan_buckets({floats(10), floats(10, true), floats(10), floats(10)}, {40, 80});
    CHECK(plan.buckets == Buckets{{0}, {1}, {2, 3}});
    CHECK(plan.limits == std::vector<int64_t>{40, 0, 80});
  }
  SECTION("an order is kept") {
    CHECK(plan_buckets(tens, {40, 80}, {3, 1, 2, 0}).buckets == Buckets{{3}, {1, 2}, {0}});
  }
  SECTION("parameters without elements are in a bucket, too") {
    CHECK(plan_buckets({floats(0), floats(0)}, {400}).buckets == Buckets{{0, 1}});
  }
}

TEST_CASE("leftover buckets in ready order close by their first parameter", "[pure][bucket_plan]") {
  const std::vector<ParameterExtent> parameters{floats(1), doubles(1), floats(1), doubles(1)};
  CHECK(plan_buckets(parameters, {400}, {3, 2, 1, 0}).buckets == Buckets{{3, 1}, {2, 0}});
  CHECK(plan_buckets(parameters, {400}, {2, 3, 1, 0}).buckets == Buckets{{2, 0}, {3, 1}});
}

TEST_CASE("random plans equal c10d's", "[pure][bucket_plan]") {
  std::mt19937 random(7);
  const auto below = [&](int bound) { return static_cast<int>(random() % bound); };
  for (int round = 0; round < 300; ++round) {
    std::vector<at::Tensor> tensors;
    std::vector<ParameterExtent> extents;
    std::vector<bool> sparse;
    const int count = 1 + below(20);
    const bool one_dtype = below(2) == 0;
    for (int i = 0; i < count; ++i) {
      const auto dtype = one_dtype || below(2) == 0 ? at::kFloat : at::kDouble;
      tensors.push_back(torch::empty({below(300)}, dtype));
      sparse.push_back(below(8) == 0);
      extents.push_back(
          {static_cast<int64_t>(tensors.back().nbytes()), dtype, at::kCPU, sparse.back()});
    }
    std::vector<size_t> caps;
    for (int i = 0; i <= below(3); ++i) caps.push_back(1 + below(2000));

    // With an order, c10d does not define the order of its leftover buckets for several dtypes.
    std::vector<size_t> order;
    if (one_dtype && below(2) == 0) {
      for (int i = 0; i < count; ++i) order.push_back(i);
      std::shuffle(order.begin(), order.end(), random);
    }
    // c10d expects the tensors themselves in that order.
    std::vector<at::Tensor> walked = tensors;
    for (size_t i = 0; i < order.size(); ++i) walked[i] = tensors[order[i]];
    const auto [buckets, limits] = c10d::compute_bucket_assignment_by_size(
        walked, caps, sparse, std::vector<int64_t>(order.begin(), order.end()));

    const auto plan = plan_buckets(extents, std::vector<int64_t>(caps.begin(), caps.end()), order);
    CAPTURE(round, count, order.size());
    REQUIRE(plan.buckets == buckets);
    REQUIRE(std::vector<size_t>(plan.limits.begin(), plan.limits.end()) == limits);
  }
}

TEST_CASE("bucket caps come from MiB and have c10d's defaults", "[pure][bucket_plan]") {
  CHECK(bucket_caps_bytes({}, {}) == std::vector<int64_t>{1 << 20, 25 << 20});
  CHECK(bucket_caps_bytes(25.0, {}) == std::vector<int64_t>{25 << 20});
  CHECK(bucket_caps_bytes(0.5, {}) == std::vector<int64_t>{1 << 19});
  CHECK(bucket_caps_bytes(3.0, {1, 2}) == std::vector<int64_t>{1 << 20, 2 << 20});
  CHECK(bucket_caps_bytes(1e30, {}) == std::vector<int64_t>{kUnlimitedBytes});
}

TEST_CASE("bad caps are refused by name and value", "[pure][errors][bucket_plan]") {
  const double bad = GENERATE(0.0, -1.0, std::numeric_limits<double>::quiet_NaN(), 1e-9);
  CHECK_THROWS_WITH(
      bucket_caps_bytes(bad, {}),
      ContainsText("bucket_cap_mb to be a positive number of MiB") && ContainsText("got "));
  CHECK_THROWS_WITH(bucket_caps_bytes({}, {1.0, bad}), ContainsText("bucket_cap_mb_list"));
  CHECK_THROWS_AS(bucket_caps_bytes(bad, {}), c10::ValueError);
  CHECK_THROWS_WITH(plan_buckets({floats(1)}, {}), ContainsText("at least one cap"));
  CHECK_THROWS_WITH(plan_buckets({floats(1)}, {4}, {0, 0}), ContainsText("order of 1"));
  CHECK_THROWS_WITH(plan_buckets({floats(1)}, {4}, {7}), ContainsText("got 7"));
}

}  // namespace ddp
