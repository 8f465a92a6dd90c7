#pragma once

#include <cstdint>
#include <deque>
#include <utility>

namespace ddp {

/// How many samples, or tokens, are trained in a second, over the last passes.
///
/// Threads: one at a time.
class Rate {
 public:
  void count(int64_t more) { counted_ += more; }
  bool is_counted() const { return counted_ > 0; }
  /// \param seconds  now, on any clock.
  void end_pass(double seconds) {
    ends_.emplace_back(seconds, counted_);
    if (ends_.size() > kPasses) ends_.pop_front();
  }
  /// 0 before the second pass.
  double per_second() const {
    if (ends_.size() < 2 || ends_.back().first <= ends_.front().first) return 0;
    return static_cast<double>(ends_.back().second - ends_.front().second) /
           (ends_.back().first - ends_.front().first);
  }

 private:
  static constexpr size_t kPasses = 100;

  int64_t counted_ = 0;
  std::deque<std::pair<double, int64_t>> ends_;  // seconds, and what was counted by then
};

}  // namespace ddp
