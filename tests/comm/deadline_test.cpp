// A deadline of any length lies ahead.
#include <chrono>

#include "comm/deadline.h"

#include "support/catch.h"

using ddp::Deadline;
using namespace std::chrono_literals;

TEST_CASE("the longest timeout is not over before it begins", "[deadline][pure]") {
  const Deadline longest(std::chrono::milliseconds::max());
  CHECK_FALSE(longest.passed());
  CHECK(longest.left() > 24h * 365);
  CHECK(longest.timeout() == std::chrono::milliseconds::max());
  CHECK_FALSE(longest.and_then(2s).passed());
}

TEST_CASE("what is left of a deadline that has passed is a millisecond", "[deadline][pure]") {
  const Deadline before(-1s);
  CHECK(before.passed());
  CHECK(before.left() == 1ms);
}
