// Deadlines of any length, also the longest.
#include <chrono>

#include "comm/base/deadline.h"

#include "support/catch.h"

using ddp::Deadline;
using namespace std::chrono_literals;

TEST_CASE("the longest timeout has not passed at its start", "[deadline][pure]") {
  const Deadline longest(std::chrono::milliseconds::max());
  CHECK_FALSE(longest.passed());
  CHECK(longest.left() > 24h * 365);
  CHECK(longest.timeout() == std::chrono::milliseconds::max());
  CHECK_FALSE(longest.and_then(2s).passed());
}

TEST_CASE("a deadline that has passed has one millisecond left", "[deadline][pure]") {
  const Deadline before(-1s);
  CHECK(before.passed());
  CHECK(before.left() == 1ms);
}
