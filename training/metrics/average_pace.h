#pragma once

#include <algorithm>
#include <cstdint>

#include <ddp/internal/metrics.h>

namespace ddp {

/// After how many values the ranks average. All ranks set it by the same numbers, so that none has
/// to be told.
class AveragePace {
 public:
  /// \param adds  a fixed number; 0: as many as take about a second.
  explicit AveragePace(int64_t adds) : is_fixed_(adds > 0), adds_(is_fixed_ ? adds : 1) {}

  int64_t adds() const { return adds_; }

  /// \param adds  that took `seconds`.
  void set(int64_t adds, double seconds) {
    // One place of the message has the time.
    constexpr auto kMost = static_cast<int64_t>(kMetricsInOneMessage) - 1;
    if (is_fixed_ || adds == 0) return;
    // At most twice as many, because a first step may say little of the others.
    const auto most = std::min(kMost, 2 * std::max(adds, adds_));
    const double in_a_second = static_cast<double>(adds) / std::max(seconds, 1e-6);
    adds_ = in_a_second >= static_cast<double>(most)
                ? most
                : std::max<int64_t>(1, static_cast<int64_t>(in_a_second));
  }

 private:
  bool is_fixed_;
  int64_t adds_;
};

}  // namespace ddp
