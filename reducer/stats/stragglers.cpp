#include "stats/stragglers.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>

namespace ddp {
namespace {

constexpr size_t kWindows[] = {20, 40, 80};
// The mean logarithm of a rank's time over that of the others: a little below that of 1.2, so that
// a rank that is 1.2 times as slow is not found by luck alone.
const double kLeastLog = std::log(1.165);
// Standard errors of that mean: the windows overlap, and there are many ranks and steps.
constexpr double kErrors = 8;

/// By rank, over a window of rows.
struct Excess {
  double log_sum = 0, square_sum = 0;  // of the logarithm of its time over the others'
  RankTimes more;                      // its times less the others', in parts of their step
};

/// One number of each rank.
class Numbers {
 public:
  explicit Numbers(size_t count) { sorted_.reserve(count); }

  template <typename Part>
  void set(const TimesOfRanks& row, const Part& part) {
    sorted_.clear();
    for (const auto& times : row) sorted_.push_back(part(times));
    std::sort(sorted_.begin(), sorted_.end());
  }
  /// The median of the others; the mean of two in the middle.
  double without(double own) const {
    const auto place = static_cast<size_t>(
        std::lower_bound(sorted_.begin(), sorted_.end(), own) - sorted_.begin());
    const auto at = [&](size_t i) { return sorted_[i < place ? i : i + 1]; };
    const size_t count = sorted_.size() - 1;
    return count % 2 == 1 ? at(count / 2) : (at(count / 2 - 1) + at(count / 2)) / 2;
  }

 private:
  std::vector<double> sorted_;
};

void add(std::vector<Excess>& ranks, const TimesOfRanks& row, Numbers& numbers) {
  std::vector<double> step(row.size());
  numbers.set(row, [](const RankTimes& t) { return t.sum(); });
  for (size_t rank = 0; rank < row.size(); ++rank) {
    const double own = row[rank].sum();
    step[rank] = numbers.without(own);
    const double log = std::log(own / step[rank]);
    ranks[rank].log_sum += log;
    ranks[rank].square_sum += log * log;
  }
  for (const auto part : {&RankTimes::data, &RankTimes::forward, &RankTimes::backward}) {
    numbers.set(row, [part](const RankTimes& t) { return t.*part; });
    for (size_t rank = 0; rank < row.size(); ++rank) {
      const double own = row[rank].*part;
      ranks[rank].more.*part += (own - numbers.without(own)) / step[rank];
    }
  }
}

const char* largest_of(const RankTimes& more) {
  if (more.data >= more.forward && more.data >= more.backward) return "data";
  return more.forward >= more.backward ? "forward" : "backward";
}

std::optional<Straggler> straggler_of(size_t rank, const Excess& excess, size_t rows) {
  const auto count = static_cast<double>(rows);
  const double mean = excess.log_sum / count;
  const double variance = std::max(excess.square_sum - excess.log_sum * mean, 0.0) / (count - 1);
  if (mean < std::max(kLeastLog, kErrors * std::sqrt(variance / count))) return {};
  return Straggler{static_cast<int>(rank), largest_of(excess.more), std::exp(mean)};
}

}  // namespace

std::vector<Straggler> find_stragglers(const std::vector<TimesOfRanks>& rows) {
  const size_t ranks = rows.empty() ? 0 : rows.back().size();
  if (ranks < 2) return {};
  std::vector<std::optional<Straggler>> found(ranks);
  std::vector<Excess> excess(ranks);
  Numbers numbers(ranks);
  size_t used = 0;
  for (const auto window : kWindows) {
    if (rows.size() < window) break;
    for (; used < window; ++used) add(excess, rows[rows.size() - 1 - used], numbers);
    for (size_t rank = 0; rank < ranks; ++rank) {
      if (!found[rank]) found[rank] = straggler_of(rank, excess[rank], window);
    }
  }
  std::vector<Straggler> stragglers;
  for (auto& straggler : found) {
    if (straggler) stragglers.push_back(std::move(*straggler));
  }
  return stragglers;
}

}  // namespace ddp
