#include "reducer/stats/bucket_cap_choice.h"

#include "support/catch.h"

namespace ddp {
namespace {

constexpr int64_t kMb = int64_t{1} << 20;

/// `count` parameters of `bytes` each, ready one by one, evenly until `backward_ms`.
struct Model {
  Model(size_t count, int64_t bytes, double backward_ms)
      : parameters(count, {bytes, at::kFloat, at::kCPU}) {
    times.backward_ms = backward_ms;
    for (size_t i = 0; i < count; ++i) {
      order.push_back(i);
      times.ready_ms.push_back(
          backward_ms * static_cast<double>(i + 1) / static_cast<double>(count));
    }
  }

  BucketPlan plan(int64_t cap) const { return plan_buckets(parameters, {cap}, order); }
  double predict(int64_t cap, const LinkCost& link) const {
    return predict_backward_ms(plan(cap), parameters, times, link);
  }
  BucketCapTuning choose(const LinkCost& link) const {
    return choose_bucket_cap(
        parameters, [this](int64_t cap) { return plan(cap); }, times, link);
  }

  std::vector<ParameterExtent> parameters;
  std::vector<size_t> order;
  StepTimes times;
};

}  // namespace

TEST_CASE("one bucket is reduced after backward, small ones during it", "[pure][tuning]") {
  const Model model(10, kMb, 100);
  const LinkCost link{1, 5.0 / kMb};
  CHECK(model.predict(kUnlimitedBytes, link) == Approx(100 + 1 + 50));
  // Ten messages of 6 ms: all but the last end before the next bucket is ready.
  CHECK(model.predict(1, link) == Approx(106));
  // Five messages of 11 ms.
  CHECK(model.predict(2 * kMb, link) == Approx(111));
}

TEST_CASE("a slow link is busy from the first bucket to the last", "[pure][tuning]") {
  const Model model(10, kMb, 100);
  const LinkCost link{1, 50.0 / kMb};
  CHECK(model.predict(1, link) == Approx(10 + 10 * 51));
  CHECK(model.predict(kUnlimitedBytes, link) == Approx(100 + 1 + 500));
}

TEST_CASE(
    "the last bucket waits for autograd, and sparse parameters cost no bytes", "[pure][tuning]") {
  Model model(2, kMb, 100);
  model.times.ready_ms = {10, 20};
  const LinkCost link{1, 5.0 / kMb};
  CHECK(model.predict(1, link) == Approx(106));
  model.parameters[1].expect_sparse = true;
  CHECK(model.predict(1, link) == Approx(101));
}

TEST_CASE("the last candidate cap holds all gradients", "[pure][tuning]") {
  const auto in_mb = [](int64_t bytes) {
    std::vector<double> caps;
    for (const int64_t cap : candidate_caps(bytes)) caps.push_back(static_cast<double>(cap) / kMb);
    return caps;
  };
  CHECK(in_mb(0) == std::vector<double>{1});
  CHECK(in_mb(kMb) == std::vector<double>{1});
  CHECK(in_mb(67 * kMb) == std::vector<double>{1, 2, 5, 10, 20, 25, 50, 100});
  CHECK(in_mb(240 * kMb).back() == 250);
}

TEST_CASE("the chosen cap balances latency and overlap", "[pure][tuning]") {
  const Model model(100, kMb, 100);
  // Without latency the smallest cap is best.
  CHECK(model.choose({0, 0.9 / kMb}).cap_mb <= 2);
  // With a large latency one message is best.
  CHECK(model.choose({200, 0.1 / kMb}).cap_mb == 100);
  const auto tuning = model.choose({2, 0.8 / kMb});
  CHECK(tuning.cap_mb >= 5);
  CHECK(tuning.cap_mb <= 25);
  for (const auto& candidate : tuning.candidates) {
    CHECK(tuning.predicted_ms <= candidate.predicted_ms * 1.0101);
    if (candidate.cap_mb == tuning.cap_mb) CHECK(candidate.predicted_ms == tuning.predicted_ms);
  }
  CHECK(tuning.latency_ms == 2);
  CHECK(tuning.ms_per_mb == Approx(0.8));
}

TEST_CASE("a link without cost leads to the largest cap", "[pure][tuning]") {
  const auto tuning = Model(10, kMb, 100).choose({});
  CHECK(tuning.cap_mb == 10);
  CHECK(tuning.predicted_ms == 100);
}

TEST_CASE("set_choice takes another rank's cap and its own prediction for it", "[pure][tuning]") {
  auto tuning = Model(10, kMb, 100).choose({1, 5.0 / kMb});
  set_choice(tuning, 10 * kMb);
  CHECK(tuning.cap_mb == 10);
  CHECK(tuning.predicted_ms == Approx(151));
}

}  // namespace ddp
