// Slow ranks in simulated times.
#include "reducer/stats/stragglers.h"

#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "support/catch.h"

namespace ddp {
namespace {

using Row = TimesOfRanks;

/// The times of steps of about 10 ms: half of it backward.
struct Times {
  explicit Times(size_t ranks) : ranks(ranks) {}

  /// Each number times the exponential of a normal one of this deviation.
  double scatter = 0.1;
  /// The part of steps that last ten times as long on one rank.
  double stalls = 0;
  /// The further time that rank 1 takes.
  RankTimes more = {};

  Row row() {
    Row times;
    for (size_t rank = 0; rank < ranks; ++rank) {
      const double factor = std::exp(scatter * normal(random)) * (draw(random) < stalls ? 10 : 1);
      times.push_back({1 * factor, 4 * factor, 5 * factor});
      if (rank != 1) continue;
      times.back().data += more.data * factor;
      times.back().forward += more.forward * factor;
      times.back().backward += more.backward * factor;
    }
    return times;
  }

  size_t ranks;
  std::mt19937_64 random{7};
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> draw;
};

std::vector<Row> rows_of(Times& times, size_t count) {
  std::vector<Row> rows;
  for (size_t i = 0; i < count; ++i) rows.push_back(times.row());
  return rows;
}

/// The windows of `steps` steps, looked at after each tenth, in which a rank was named.
int alarms(Times times, int steps) {
  std::vector<Row> rows;
  int count = 0;
  for (int step = 1; step <= steps; ++step) {
    rows.push_back(times.row());
    if (rows.size() > kStragglerRows) rows.erase(rows.begin());
    if (step % 10 == 0 && !find_stragglers(rows).empty()) ++count;
  }
  return count;
}

}  // namespace

TEST_CASE("equal ranks raise no alarm in 100000 steps", "[pure][stragglers]") {
  const size_t ranks = GENERATE(as<size_t>(), 2, 8);
  const double scatter = GENERATE(as<double>(), 0.1, 0.5);
  const double stalls = GENERATE(as<double>(), 0.0, 0.02);
  CAPTURE(ranks, scatter, stalls);
  Times times(ranks);
  times.scatter = scatter;
  times.stalls = stalls;
  CHECK(alarms(times, 100000) == 0);
}

TEST_CASE("a rank that is a fifth slower is named after about 20 steps", "[pure][stragglers]") {
  const size_t ranks = GENERATE(as<size_t>(), 2, 4, 16);
  const double scatter = GENERATE(as<double>(), 0.01, 0.05, 0.1);
  CAPTURE(ranks, scatter);
  Times times(ranks);
  times.scatter = scatter;
  times.more.backward = 2;
  const int runs = 100;
  int at_once = 0, later = 0;
  for (int run = 0; run < runs; ++run) {
    auto rows = rows_of(times, 20);
    const auto is_found = [&] {
      const auto found = find_stragglers(rows);
      return found.size() == 1 && found[0].rank == 1 && found[0].what == "backward";
    };
    at_once += is_found() ? 1 : 0;
    for (int step = 0; step < (scatter < 0.1 ? 10 : 60) && !is_found(); ++step) {
      rows.push_back(times.row());
    }
    later += is_found() ? 1 : 0;
  }
  if (scatter < 0.1) CHECK(at_once > runs / 2);
  CHECK(later > runs * 95 / 100);
}

TEST_CASE("the part that takes most of the further time is named", "[pure][stragglers]") {
  Times times(4);
  times.scatter = 0.01;
  times.more = {3, 1, 2};
  const auto found = find_stragglers(rows_of(times, 20));
  REQUIRE(found.size() == 1);
  CHECK(found[0].what == "data");
  CHECK(found[0].factor == Approx(1.6).epsilon(0.02));
  times.more = {0, 3, 2};
  CHECK(find_stragglers(rows_of(times, 20)).at(0).what == "forward");
}

TEST_CASE("a rank is slow only while it is", "[pure][stragglers]") {
  Times times(4);
  times.more.forward = 5;
  auto rows = rows_of(times, 19);
  CHECK(find_stragglers(rows).empty());  // too few
  rows.push_back(times.row());
  CHECK(find_stragglers(rows).size() == 1);
  times.more = {};
  for (size_t step = 0; step < kStragglerRows; ++step) rows.push_back(times.row());
  CHECK(find_stragglers(rows).empty());
  CHECK(find_stragglers({}).empty());
  CHECK(find_stragglers(std::vector<Row>(30, Row{{1, 2, 3}})).empty());  // alone
}

TEST_CASE("where steps differ more, more of them show a slow rank", "[pure][stragglers]") {
  Times times(4);
  times.scatter = 0.2;
  times.more.backward = 3.5;
  int soon = 0, late = 0;
  for (int run = 0; run < 100; ++run) {
    const auto rows = rows_of(times, 80);
    late += find_stragglers(rows).empty() ? 0 : 1;
    soon += find_stragglers({rows.begin(), rows.begin() + 20}).empty() ? 0 : 1;
  }
  CHECK(late > 90);
  CHECK(soon < late);
}

}  // namespace ddp
