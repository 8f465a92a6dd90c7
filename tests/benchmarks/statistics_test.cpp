#include "benchmarks/ddp_bench/statistics.h"

#include <torch/torch.h>

#include "support/catch.h"

// report_test.py has the same values for the Python peers.
TEST_CASE("quantiles interpolate between the nearest values", "[benchmarks][pure]") {
  CHECK(ddp_bench::quantile({3}, 0.1) == 3);
  CHECK(ddp_bench::quantile({4, 1, 3, 2}, 0.5) == 2.5);
  CHECK(ddp_bench::quantile({5, 1, 3}, 0.5) == 3);
  CHECK(ddp_bench::quantile({10, 20, 30, 40, 50}, 0.1) == Approx(14));
  CHECK(ddp_bench::quantile({10, 20, 30, 40, 50}, 0.9) == Approx(46));
  CHECK(ddp_bench::quantile({2, 1}, 0) == 1);
  CHECK(ddp_bench::quantile({2, 1}, 1) == 2);
}

TEST_CASE("quantiles need values and a share", "[benchmarks][pure][errors]") {
  CHECK_THROWS_WITH(ddp_bench::quantile({}, 0.5), ContainsText("got 0 values"));
  CHECK_THROWS_WITH(ddp_bench::quantile({1}, 1.5), ContainsText("1.5"));
}

TEST_CASE("overlap is the hidden share of the communication", "[benchmarks][pure]") {
  CHECK(ddp_bench::overlap(50, 100, 150) == 0);    // one after the other
  CHECK(ddp_bench::overlap(50, 100, 100) == 0.5);  // half of the messages during the computation
  CHECK(ddp_bench::overlap(50, 100, 75) == 0.75);
  CHECK(ddp_bench::overlap(100, 50, 100) == 1);  // no visible cost
}

TEST_CASE("overlap stays between 0 and 1", "[benchmarks][pure]") {
  CHECK(ddp_bench::overlap(100, 50, 90) == 1);   // faster than none: noise
  CHECK(ddp_bench::overlap(100, 50, 200) == 0);  // also copies
  CHECK(ddp_bench::overlap(100, 0, 90) == 0);    // nothing to hide
}

// From tables of the sign test: of 10 values the 2nd and the 9th, of 20 the 6th and the 15th, ...
TEST_CASE("a median's interval ends at two of the values", "[benchmarks][pure]") {
  struct Case {
    int count, low, high;
  };
  for (const auto& [count, low, high] :
       {Case{6, 1, 6},
        {8, 1, 8},
        {9, 2, 8},
        {10, 2, 9},
        {20, 6, 15},
        {50, 18, 33},
        {100, 40, 61}}) {
    std::vector<double> values;
    for (int i = 0; i < count; ++i) values.push_back((i * 7 + 3) % count + 1);  // all of 1 to count
    CAPTURE(count);
    const auto interval = ddp_bench::median_interval(values);
    REQUIRE(interval.has_value());
    CHECK(interval->low == low);
    CHECK(interval->high == high);
  }
  // Powers of one half that no double can represent.
  CHECK(ddp_bench::median_interval(std::vector<double>(3000, 2.5))->low == 2.5);
}

TEST_CASE("few values have no interval", "[benchmarks][pure]") {
  CHECK_FALSE(ddp_bench::median_interval({}).has_value());
  CHECK_FALSE(ddp_bench::median_interval({1, 2, 3, 4, 5}).has_value());
  CHECK(ddp_bench::kFewestForInterval == 6);
}

TEST_CASE("ratios compare values of the same round", "[benchmarks][pure]") {
  // The machine slows down; one round of each mode was disturbed.
  const std::vector<double> base = {10, 20, 30, 40, 50, 600, 70};
  const auto ratio = ddp_bench::paired_ratio({11, 22, 33, 400, 55, 66, 77}, base);
  CHECK(ratio.median == Approx(1.1));
  REQUIRE(ratio.of_rounds.size() == 7);
  CHECK(ratio.of_rounds[3] == 10);
  REQUIRE(ratio.interval.has_value());
  CHECK(ratio.interval->low == Approx(0.11));
  CHECK(ratio.interval->high == Approx(10));
  CHECK_FALSE(ddp_bench::paired_ratio({11, 22}, {10, 20}).interval.has_value());
  CHECK(ddp_bench::paired_ratio({11, 22}, {10, 20}).median == Approx(1.1));
  CHECK_THROWS_WITH(
      ddp_bench::paired_ratio({1, 2}, {1}), ContainsText("expected as many values as of the base"));
}
