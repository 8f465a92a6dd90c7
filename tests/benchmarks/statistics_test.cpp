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
  CHECK(ddp_bench::overlap(50, 100, 100) == 0.5);  // half of the messages beside the computation
  CHECK(ddp_bench::overlap(50, 100, 75) == 0.75);
  CHECK(ddp_bench::overlap(100, 50, 100) == 1);  // no trace of them
}

TEST_CASE("overlap stays between 0 and 1", "[benchmarks][pure]") {
  CHECK(ddp_bench::overlap(100, 50, 90) == 1);   // faster than none: noise
  CHECK(ddp_bench::overlap(100, 50, 200) == 0);  // copies, too
  CHECK(ddp_bench::overlap(100, 0, 90) == 0);    // nothing to hide
}
