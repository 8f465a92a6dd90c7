#include "data/ordered_workers.h"

#include <atomic>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "data/threads.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;
using Numbers = std::vector<size_t>;

// A number, and the function that `run` calls with it.
struct Numbered : Work {
  Numbered(size_t n, std::function<void(size_t)> b) : number(n), body(std::move(b)) {}
  void run() override {
    if (body) body(number);
  }
  size_t number;
  std::function<void(size_t)> body;
  Counted counted;
};

size_t number_of(const std::unique_ptr<Work>& work) {
  return static_cast<const Numbered&>(*work).number;
}

// Draws 0, 1, ... up to `size`.
OrderedWorkers::Draw numbers(size_t size, std::function<void(size_t)> body = {}) {
  return [=, next = size_t{0}]() mutable -> std::unique_ptr<Work> {
    if (next == size) return nullptr;
    return std::make_unique<Numbered>(next++, body);
  };
}

Numbers up_to(size_t size) {
  Numbers all(size);
  for (size_t i = 0; i < size; ++i) all[i] = i;
  return all;
}

// Takes work until the end or an error, whose text goes to `error`.
Numbers taken_from(OrderedWorkers& workers, std::string* error = nullptr) {
  Numbers taken;
  try {
    while (const auto work = workers.next()) taken.push_back(number_of(work));
  } catch (const std::runtime_error& e) {
    REQUIRE(error);
    *error = e.what();
  }
  return taken;
}

}  // namespace

TEST_CASE(
    "work is returned in the order of its draws, though later pieces finish first", "[pure]") {
  const size_t threads = GENERATE(1, 2, 3, 4);
  CAPTURE(threads);
  // In every group of as many pieces as there are threads, the first one finishes last.
  std::vector<Count> done(8);
  std::atomic<int> in_vain{0};
  OrderedWorkers workers(threads, threads, numbers(8 * threads, [&](size_t number) {
                           Count& group = done[number / threads];
                           if (number % threads == 0 && !group.wait_for(threads - 1)) ++in_vain;
                           group.raise();
                         }));
  CHECK(taken_from(workers) == up_to(8 * threads));
  CHECK(in_vain == 0);
}

TEST_CASE("the end is returned again and again, and nothing is left", "[pure]") {
  const auto threads_before = thread_count();
  Count draws;
  OrderedWorkers workers(3, 9, [&, source = numbers(4)]() mutable {
    draws.raise();
    return source();
  });
  CHECK(taken_from(workers) == up_to(4));
  CHECK(draws.value() == 5);  // nothing is drawn after the end
  CHECK(threads_left(threads_before));
  CHECK(Counted::alive() == 0);
  CHECK(workers.next() == nullptr);
  CHECK(workers.next() == nullptr);
}

TEST_CASE("nothing to draw is an immediate end", "[pure]") {
  OrderedWorkers workers(2, 2, numbers(0));
  CHECK(workers.next() == nullptr);
}

TEST_CASE("no more than depth pieces are drawn ahead", "[pure]") {
  const auto sizes = GENERATE(table<size_t, size_t>({{1, 1}, {1, 3}, {2, 2}, {4, 2}}));
  const size_t threads = std::get<0>(sizes);
  const size_t depth = std::get<1>(sizes);
  CAPTURE(threads, depth);
  constexpr size_t kPieces = 300;
  // `asked` is raised before each next(), so it is never less than the number of pieces taken.
  Count asked;
  Count drawn;
  std::atomic<int> too_many{0};
  const auto draw = [&, source = numbers(kPieces)]() mutable {
    if (drawn.raise() > asked.value() + depth) ++too_many;
    return source();
  };
  OrderedWorkers workers(threads, depth, draw);
  for (size_t i = 0; i + depth < kPieces; ++i) {
    // The workers are as far ahead as allowed, and nothing is taken: one more piece would be too
    // many.
    REQUIRE(drawn.wait_for(i + depth));
    asked.raise();
    REQUIRE(number_of(workers.next()) == i);
  }
  CHECK(too_many == 0);
}

TEST_CASE("threads that would have no work are not started", "[pure]") {
  const auto threads_before = thread_count();
  Count go;
  OrderedWorkers workers(6, 2, numbers(10, [&](size_t) { go.wait_for(1); }));
  CHECK(thread_count() <= threads_before + 2);
  go.raise();
  CHECK(taken_from(workers) == up_to(10));
}

TEST_CASE("an error in a piece of work is thrown in place of that piece", "[errors]") {
  const size_t threads = GENERATE(1, 2, 4);
  CAPTURE(threads);
  const auto threads_before = thread_count();
  // Raised when the failed piece is destroyed.
  Count dropped;
  struct Failing : Work {
    explicit Failing(Count& d) : dropped_(d) {}
    ~Failing() override { dropped_.raise(); }
    void run() override { throw std::runtime_error("no 5"); }
    Count& dropped_;
  };
  std::atomic<int> in_vain{0};
  const auto body = [&](size_t number) {
    // With spare threads, the piece before the error is done only after the error.
    if (number == 4 && threads > 1 && !dropped.wait_for(1)) ++in_vain;
  };
  const auto draw = [&, source = numbers(100, body)]() mutable -> std::unique_ptr<Work> {
    auto work = source();
    if (number_of(work) == 5) return std::make_unique<Failing>(dropped);
    return work;
  };
  OrderedWorkers workers(threads, threads + 1, draw);
  std::string error;
  CHECK(taken_from(workers, &error) == up_to(5));
  CHECK(error == "no 5");
  CHECK(in_vain == 0);
  CHECK(workers.next() == nullptr);
  CHECK(threads_left(threads_before));
  CHECK(Counted::alive() == 0);
}

TEST_CASE("an error in drawing comes after the drawn pieces, and is the last draw", "[errors]") {
  const size_t threads = GENERATE(1, 2, 4);
  CAPTURE(threads);
  Count draws;
  const auto draw = [&, source = numbers(100)]() mutable {
    if (draws.raise() == 6) throw std::runtime_error("no sixth");
    return source();
  };
  OrderedWorkers workers(threads, 20, draw);
  std::string error;
  CHECK(taken_from(workers, &error) == up_to(5));
  CHECK(error == "no sixth");
  CHECK(draws.value() == 6);
  CHECK(workers.next() == nullptr);
}

TEST_CASE("stop lets threads finish their current piece and keeps nothing", "[pure]") {
  const size_t threads = GENERATE(1, 2, 4);
  const size_t taken = GENERATE(0, 1, 7);
  CAPTURE(threads, taken);
  const auto threads_before = thread_count();
  Count started;
  Count finished;
  {
    OrderedWorkers workers(threads, 2 * threads, numbers(1000, [&](size_t) {
                             started.raise();
                             finished.raise();
                           }));
    for (size_t i = 0; i < taken; ++i) REQUIRE(number_of(workers.next()) == i);
    // Some pieces are finished, and every thread waits for room or is about to.
    REQUIRE(started.wait_for(taken + 2 * threads));
    if (taken == 1) {
      workers.stop();
      CHECK(workers.next() == nullptr);
    }
  }
  CHECK(started.value() == finished.value());
  CHECK(started.value() <= taken + 2 * threads);
  CHECK(threads_left(threads_before));
  CHECK(Counted::alive() == 0);
}

TEST_CASE("a piece in work at the time of a stop is dropped, error or not", "[pure]") {
  const bool fails = GENERATE(false, true);
  CAPTURE(fails);
  const auto threads_before = thread_count();
  Count begun;
  std::atomic<int> in_vain{0};
  // One thread runs until the other, which waited for room, has noticed the stop.
  OrderedWorkers workers(2, 2, numbers(10, [&](size_t number) {
                           begun.raise();
                           if (number != 0) return;
                           begun.wait_for(2);
                           if (!threads_left(threads_before + 1)) ++in_vain;
                           if (fails) throw std::runtime_error("too late");
                         }));
  REQUIRE(begun.wait_for(2));
  workers.stop();
  CHECK(in_vain == 0);
  CHECK(workers.next() == nullptr);
  CHECK(begun.value() == 2);
  CHECK(threads_left(threads_before));
  CHECK(Counted::alive() == 0);
}

}  // namespace ddp
