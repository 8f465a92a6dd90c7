// Ranks that call different collectives throw in seconds, naming two ranks and their calls. A rank
// that is only late causes no error.
#include <condition_variable>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ddp/collectives.h>

#include "comm/group/group_builder.h"
#include "comm/watched_store.h"
#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using testing::error_of;
using testing::errors_of_ranks;
using testing::kLongTimeout;
using testing::Rank;
using testing::run_ranks;
using testing::timed_error_of;
using testing::TimedError;
using testing::WatchedStore;
using Op = c10d::ReduceOp;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Two seconds until a rank compares its calls, plus a margin for a busy machine.
constexpr double kBoundOfComparison = 20;

void sum(const GroupArg& group, int64_t numel = 10, at::ScalarType dtype = at::kFloat) {
  auto tensor = at::ones({numel}, dtype);
  all_reduce(tensor, Op::SUM, group);
}

void maximum(const GroupArg& group) {
  auto tensor = at::ones({10});
  all_reduce(tensor, Op::MAX, group);
}

void broadcast_from(int src, const GroupArg& group) {
  auto tensor = at::ones({10});
  broadcast(tensor, src, group);
}

/// Starts a hundred all-reduces, more than any text shows; one of them differs on rank 1.
void many_at_once(const Rank& self) {
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 100; ++i) tensors.push_back(at::ones({i == 3 && self.rank == 1 ? 9 : 10}));
  std::vector<WorkPtr> works;
  for (auto& tensor : tensors) works.push_back(all_reduce_async(tensor, Op::SUM, self.group));
  for (const auto& work : works) work->wait();
}

/// The calls of the ranks after one sum(group), and the part of the error text that depends on
/// them.
struct Scene {
  std::string what;
  int size;
  std::function<void(const Rank&)> body;
  std::string number;
  std::string calls;  // a regular expression
};

std::vector<Scene> scenes() {
  const std::string sum_of_10 = "all_reduce of 10 x Float, SUM";
  const std::string sum_of_many = "all_reduce of 1000000 x Float, SUM";
  return {
      {"kinds", 2,
       [](const Rank& self) { self.rank == 0 ? sum(self.group) : broadcast_from(0, self.group); },
       "1", "rank 0 called " + sum_of_10 + " and rank 1 broadcast of 10 x Float from rank 0"},
      {"orders", 2,
       [](const Rank& self) {
         if (self.rank == 0) barrier(self.group);
         sum(self.group);
         if (self.rank == 1) barrier(self.group);
       },
       "1", "rank 0 called barrier and rank 1 " + sum_of_10},
      {"sizes", 3, [](const Rank& self) { sum(self.group, self.rank == 1 ? 1000000 : 10); }, "1",
       "(rank 0 called " + sum_of_10 + " and rank 1 " + sum_of_many + "|rank 1 called " +
           sum_of_many + " and rank 2 " + sum_of_10 + ")"},
      {"dtypes", 2,
       [](const Rank& self) { sum(self.group, 10, self.rank == 0 ? at::kFloat : at::kInt); }, "1",
       "rank 0 called " + sum_of_10 + " and rank 1 all_reduce of 10 x Int, SUM"},
      {"reductions", 2,
       [](const Rank& self) { self.rank == 0 ? sum(self.group) : maximum(self.group); }, "1",
       "rank 0 called " + sum_of_10 + " and rank 1 all_reduce of 10 x Float, MAX"},
      {"roots", 2,
       [](const Rank& self) {
         broadcast_from(self.rank, self.group);
         barrier(self.group);  // because a root may return from its broadcast
       },
       "1",
       "rank 0 called broadcast of 10 x Float from rank 0 and rank 1 broadcast of 10 x Float from "
       "rank 1"},
      {"one left out", 3,
       [](const Rank& self) {
         if (self.rank != 2) barrier(self.group);
         sum(self.group);
       },
       "1", "rank [01] called barrier and rank 2 " + sum_of_10},
      {"one of many at once", 2, many_at_once, "4",
       "rank 0 called " + sum_of_10 + " and rank 1 all_reduce of 9 x Float, SUM"},
  };
}

struct Played {
  std::vector<TimedError> errors;
};

Played play(const Scene& scene) {
  return {run_ranks<TimedError>(
      scene.size,
      [&](const Rank& self) {
        sum(self.group);
        auto error = timed_error_of([&] {
          scene.body(self);
          sum(self.group);
        });
        self.wait_until_others_end();
        return error;
      },
      kLongTimeout)};
}

/// Lets ranks wait for each other without the group.
class Counter {
 public:
  void count() {
    const std::lock_guard lock(mutex_);
    ++count_;
    changed_.notify_all();
  }
  void forget() {
    const std::lock_guard lock(mutex_);
    count_ = 0;
  }
  void wait_for(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return count_ >= count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

/// The options of a further group of the same ranks and kind.
ProcessGroupOptions options_over(const Rank& self, const c10::intrusive_ptr<c10d::Store>& store) {
  return ProcessGroupOptions()
      .backend(self.group->getBackend(at::kCPU)->getBackendName())
      .store(store)
      .rank(self.rank)
      .world_size(self.size)
      .timeout(kLongTimeout.collective_timeout);
}

/// Makes such a group. `comparisons` counts how often ranks compare their calls.
ProcessGroup watched_group(const Rank& self, Counter& comparisons) {
  const auto store =
      c10::make_intrusive<WatchedStore>(self.store, [&comparisons](const std::string& operation) {
        if (operation == "compareSet") comparisons.count();
      });
  const auto group = make_process_group(options_over(self, store));
  barrier(self.group);  // all ranks have made the group
  if (self.rank == 0) comparisons.forget();
  barrier(self.group);
  return group;
}

}  // namespace

TEST_CASE(
    "ranks that call different collectives all throw the calls of two of them",
    "[comm][ranks][errors][monitor]") {
  // All scenes run at the same time, because their ranks wait and do not compute.
  const auto all = scenes();
  std::vector<std::future<Played>> played;
  for (const auto& scene : all) {
    played.push_back(std::async(std::launch::async, [&scene] { return play(scene); }));
  }
  for (size_t i = 0; i < all.size(); ++i) {
    const auto& scene = all[i];
    CAPTURE(scene.what);
    const auto errors = played[i].get().errors;
    for (const auto& [error, seconds] : errors) {
      CHECK_THAT(
          error,
          Catch::Matchers::Matches(
              "process group \"default_pg\": expected every rank to call the same collective "
              "number " +
              scene.number + ", but " + scene.calls + "\\. Call the same collectives .*" +
              "Their last calls: both called 0 all_reduce of 10 x Float, SUM; .*then rank . "
              "called " +
              scene.number + " .*; rank . called " + scene.number +
              " .*, and waits in .*\\. The process group is aborted.*"));
      CHECK(error == errors[0].error);
      CHECK(seconds < kBoundOfComparison);
    }
  }
}

TEST_CASE(
    "the error names the group whose collectives differ, and another group still works",
    "[comm][ranks][errors][monitor]") {
  const auto errors = errors_of_ranks(
      3,
      [](const Rank& self) {
        const auto parent = build_group(options_over(self, self.store));
        const auto pair = new_group({0, 2}, parent);
        for (int i = 0; i < 3; ++i) {  // alternately, different numbers in each group
          sum(self.group, 7);
          if (pair) sum(pair, 5);
          sum(self.group, 6);
        }
        const auto error = error_of([&] {
          if (pair) sum(pair, self.rank == 0 ? 8 : 9);
        });
        sum(self.group);
        TORCH_CHECK(error.empty(), error);
      },
      kLongTimeout);
  CHECK(errors[1].empty());
  CHECK(errors[0] == errors[2]);
  CHECK_THAT(
      errors[0],
      ContainsText("process group \"group [0, 2]\": expected every rank to call the same "
                   "collective number 3, but rank 0 called all_reduce of 8 x Float, SUM and rank 2 "
                   "all_reduce of 9 x Float, SUM"));
}

TEST_CASE("a rank that is late causes no error", "[comm][ranks][monitor]") {
  Counter comparisons;
  const auto sums = run_ranks<double>(
      3,
      [&](const Rank& self) {
        const auto group = watched_group(self, comparisons);
        sum(group);
        // Messages are not collectives, so ranks may send different numbers of them.
        auto message = at::ones({3});
        for (int i = 0; i < 4 && self.rank < 2; ++i) {
          self.rank == 0 ? send(message, 1, i, group) : void(recv(message, 0, i, group));
        }
        // The ranks have started different numbers of calls when they wait for the last rank.
        auto first = at::ones({4}), second = at::ones({5});
        std::vector<WorkPtr> works;
        if (self.rank == 2) comparisons.wait_for(2);  // by both others
        works.push_back(all_reduce_async(first, Op::SUM, group));
        if (self.rank == 1) works.push_back(all_reduce_async(second, Op::SUM, group));
        works[0]->wait();
        if (self.rank != 1) works.push_back(all_reduce_async(second, Op::SUM, group));
        works[1]->wait();
        return (first[0] + second[0]).item<double>();
      },
      kLongTimeout);
  CHECK(sums == std::vector<double>(3, 6));
}

TEST_CASE(
    "a rank that leaves before the others' last collective is named",
    "[comm][ranks][errors][monitor]") {
  const auto errors = errors_of_ranks(
      2,
      [](const Rank& self) {
        sum(self.group);
        if (self.rank == 0) sum(self.group);
      },
      kLongTimeout);
  CHECK(errors[1].empty());
  CHECK_THAT(errors[0], ContainsText("rank 1 of 2 has ended, or left the process group"));
  CHECK(errors[0].find("expected every rank to call") == std::string::npos);
}

}  // namespace ddp
