#pragma once

#include <algorithm>
#include <chrono>

namespace ddp {

/// One timeout for all steps of a call.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;

  explicit Deadline(Milliseconds timeout) : timeout_(timeout), end_(in(timeout)) {}

  /// Ten years: a longer timeout would overflow clocks, ours and those of backends.
  static constexpr Milliseconds kLongest = std::chrono::hours(24 * 3650);

  /// The time after `timeout`, or after the longest.
  static Clock::time_point in(Milliseconds timeout) {
    return Clock::now() + std::min(timeout, kLongest);
  }

  /// The call's timeout, for messages.
  Milliseconds timeout() const { return timeout_; }

  bool passed() const { return Clock::now() > end_; }

  /// The time left, at least 1 ms: for waits that take 0 for "no timeout".
  Milliseconds left() const {
    return std::max(std::chrono::ceil<Milliseconds>(end_ - Clock::now()), Milliseconds(1));
  }

  /// A later deadline, for the ranks to exchange their results after this one has passed.
  Deadline and_then(Milliseconds more) const {
    auto later = *this;
    later.end_ = std::max(end_, Clock::now()) + more;
    return later;
  }

 private:
  Milliseconds timeout_;
  Clock::time_point end_;
};

}  // namespace ddp
