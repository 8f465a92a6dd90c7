// The monitor of a group: all ranks throw a rank's failure in bounded time, and a rank that is only
// slow causes no error.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ddp/collectives.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/internal/group_monitor.h>
#include <torch/torch.h>

#include "comm/group/group_builder.h"
#include "comm/group/monitored_group.h"
#include "comm/watched_store.h"
#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace std::chrono_literals;
using testing::error_of;
using testing::errors_of_ranks;
using testing::kLongTimeout;
using testing::Rank;
using testing::run_ranks;
using testing::timed_error_of;
using testing::TimedError;
using testing::WatchedStore;

// Seconds within which a rank throws another rank's failure.
constexpr double kBound = 20;
constexpr const char* kAborted = "The process group is aborted: end the job, or make a new process";

/// Lets ranks wait for each other without the group.
class MeetingPoint {
 public:
  explicit MeetingPoint(int size) : missing_(size) {}

  void arrive() {
    const std::lock_guard lock(mutex_);
    --missing_;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return missing_ <= 0; });
  }
  /// Makes a rank late. A fixed time, because no event shows what the other ranks have done
  /// meanwhile.
  void be_late(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, time, [] { return false; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int missing_;
};

void sum(const ProcessGroup& group) {
  auto tensor = at::ones({4});
  all_reduce(tensor, c10d::ReduceOp::SUM, group);
  TORCH_CHECK(tensor[0].item<float>() == static_cast<float>(group->getSize()), "a wrong sum");
}

void collective(const std::string& way, const ProcessGroup& group) {
  auto tensor = at::ones({4});
  if (way == "all_reduce") return all_reduce(tensor, c10d::ReduceOp::SUM, group);
  if (way == "barrier") return barrier(group);
  if (way == "broadcast_async") {
    broadcast_async(tensor, 1, group)->wait();
    return;
  }
  TORCH_CHECK(way == "recv", way);
  recv(tensor, 1, 0, group);
}

/// A further group of the same ranks and kind over a store of the test's.
ProcessGroup group_over(
    const Rank& self, const c10::intrusive_ptr<c10d::Store>& store,
    std::chrono::milliseconds timeout = 50s) {
  return make_process_group(ProcessGroupOptions()
                                .backend(self.group->getBackend(at::kCPU)->getBackendName())
                                .store(store)
                                .rank(self.rank)
                                .world_size(self.size)
                                .timeout(timeout));
}

struct Seen {
  TimedError first;
  std::string next;
  std::string aborted;
};

}  // namespace

TEST_CASE(
    "all waiting ranks throw a rank's failure, with its text", "[comm][ranks][errors][monitor]") {
  const std::string way = GENERATE("all_reduce", "barrier", "broadcast_async", "recv");
  const bool cannot_start = GENERATE(false, true);
  CAPTURE(way, cannot_start);
  MeetingPoint others(2);
  const auto seen = run_ranks<Seen>(
      3,
      [&](const Rank& self) {
        sum(self.group);
        Seen seen;
        if (self.rank != 1) {
          others.arrive();
          seen.first = timed_error_of([&] { collective(way, self.group); });
        } else {
          others.wait();
          if (cannot_start) {
            const auto start = []() -> StartedCall {
              TORCH_CHECK(false, "rank 1 is out of memory");
            };
            seen.first =
                timed_error_of([&] { monitored("all_reduce", *self.group, at::kCPU, start); });
          } else {
            monitor_of(self.group)->fail("rank 1 is out of memory");
          }
        }
        seen.next = error_of([&] { sum(self.group); });
        seen.aborted = monitor_of(self.group)->aborted().value_or("");
        self.wait_until_others_end();
        return seen;
      },
      kLongTimeout);
  for (int rank = 0; rank < 3; ++rank) {
    CAPTURE(rank);
    if (rank != 1 || cannot_start) {
      CHECK_THAT(
          seen[rank].first.error,
          ContainsText("rank 1 is out of memory") && ContainsText(kAborted));
      CHECK(seen[rank].first.seconds < kBound);
      // A local failure has no list of the ranks that had arrived.
      CHECK(seen[rank].first.error.find("arrived") == std::string::npos);
    }
    // The text is the same on every rank.
    CHECK(seen[rank].next == seen[0].first.error);
    CHECK(seen[rank].aborted == seen[0].first.error);
  }
}

TEST_CASE(
    "a rank's failure ends waits for it that bypass the monitor",
    "[comm][ranks][errors][monitor]") {
  MeetingPoint others(2);
  const auto seen = run_ranks<TimedError>(
      3,
      [&](const Rank& self) -> TimedError {
        std::vector<at::Tensor> tensors{at::ones({4})};
        TimedError seen;
        if (self.rank != 1) {
          const auto work = self.group->allreduce(tensors);
          others.arrive();
          seen = timed_error_of([&] { work->wait(); });
        } else {
          others.wait();
          monitor_of(self.group)->fail("rank 1 is out of memory");
        }
        self.wait_until_others_end();
        return seen;
      },
      kLongTimeout);
  for (const int rank : {0, 2}) {
    CAPTURE(rank);
    CHECK_FALSE(seen[rank].error.empty());
    CHECK(seen[rank].seconds < kBound);
  }
}

TEST_CASE(
    "a handle that never completes fails when its wait throws", "[comm][ranks][errors][monitor]") {
  // Like the handle of ProcessGroupGloo's reduce-scatter, which runs its last step in wait().
  class Lazy : public c10d::Work {
   public:
    explicit Lazy(bool is_std) : Work(-1, c10d::OpType::UNKNOWN), is_std_(is_std) {}
    bool isCompleted() override { return false; }
    bool wait(std::chrono::milliseconds /*timeout*/) override {
      if (!is_std_) throw 7;  // NOLINT: not a std::exception
      TORCH_CHECK(false, "its end failed");
    }

   private:
    const bool is_std_;
  };
  const bool is_std = GENERATE(true, false);
  const auto seen = run_ranks<TimedError>(
      2,
      [&](const Rank& self) {
        const auto start = [&] { return StartedCall{{c10::make_intrusive<Lazy>(is_std)}}; };
        return timed_error_of(
            [&] { monitored("reduce_scatter", *self.group, at::kCPU, start)->wait(); });
      },
      kLongTimeout);
  for (const auto& rank : seen) {
    CHECK_THAT(rank.error, ContainsText("reduce_scatter failed on rank "));
    CHECK_THAT(rank.error, ContainsText(is_std ? "its end failed" : "no std::exception"));
    CHECK(rank.seconds < kBound);
  }
}

TEST_CASE("all ranks throw the first of several failures", "[comm][ranks][errors][monitor]") {
  MeetingPoint failing(2);
  const auto seen = run_ranks<std::vector<std::string>>(
      3,
      [&](const Rank& self) {
        std::string stands;
        if (self.rank == 2) {
          stands = error_of([&] { sum(self.group); });
        } else {
          failing.arrive();
          failing.wait();
          stands = monitor_of(self.group)->fail("boom on " + std::to_string(self.rank)) + ". ";
        }
        const auto next = error_of([&] { sum(self.group); });
        const auto again = monitor_of(self.group)->fail("a later one");
        self.wait_until_others_end();
        return std::vector<std::string>{stands.substr(0, 10), next.substr(0, 10), again};
      },
      kLongTimeout);
  const auto first = seen[2][0];
  CAPTURE(first);
  CHECK((first == "boom on 0." || first == "boom on 1."));
  for (const auto& texts : seen) {
    CHECK(texts == std::vector<std::string>{first, first, first.substr(0, 9)});
  }
}

TEST_CASE(
    "a rank that leaves by an exception is named by its number", "[comm][ranks][errors][monitor]") {
  const std::string owner = GENERATE("group", "wrapper");
  const std::string way = GENERATE("all_reduce", "barrier", "recv");
  CAPTURE(owner, way);
  std::vector<ProcessGroup> kept(3);
  std::vector<TimedError> seen(3);
  const auto errors = errors_of_ranks(
      3,
      [&](const Rank& self) {
        std::optional<DistributedDataParallel<torch::nn::Linear>> model;
        if (owner == "wrapper") {
          // Users keep groups where no exception destroys them, such as the default group.
          kept[self.rank] = self.group;
          model.emplace(
              torch::nn::Linear(2, 2), DistributedDataParallelOptions().process_group(self.group));
        }
        sum(self.group);
        TORCH_CHECK(self.rank != 1, "user boom");
        seen[self.rank] = timed_error_of([&] { collective(way, self.group); });
      },
      kLongTimeout);
  CHECK_THAT(errors[1], ContainsText("user boom"));
  for (const int rank : {0, 2}) {
    CAPTURE(rank);
    CHECK(errors[rank].empty());
    CHECK_THAT(
        seen[rank].error,
        ContainsText("an exception in the program of rank 1 of 3 ended its part in the training") &&
            ContainsText(kAborted));
    CHECK(seen[rank].seconds < kBound);
  }
}

TEST_CASE(
    "a rank that leaves while others wait is named by its number",
    "[comm][ranks][errors][monitor]") {
  const std::string way = GENERATE("all_reduce", "barrier", "recv");
  CAPTURE(way);
  std::vector<TimedError> seen(3);
  const auto errors = errors_of_ranks(
      3,
      [&](const Rank& self) {
        sum(self.group);
        if (self.rank == 1) return;
        seen[self.rank] = timed_error_of([&] { collective(way, self.group); });
        self.wait_until_others_end();
      },
      kLongTimeout);
  CHECK(errors == std::vector<std::string>(3));
  for (const int rank : {0, 2}) {
    CAPTURE(rank);
    CHECK_THAT(seen[rank].error, ContainsText("rank 1 of 3 has ended, or left the process group"));
    CHECK(seen[rank].seconds < kBound);
  }
}

TEST_CASE(
    "what threw on a rank that leaves later is in the others' texts",
    "[comm][ranks][errors][monitor]") {
  const bool goes_on = GENERATE(false, true);
  CAPTURE(goes_on);
  std::string seen;
  const auto errors = errors_of_ranks(
      2,
      [&](const Rank& self) {
        sum(self.group);
        const auto monitor = monitor_of(self.group);
        if (self.rank == 1) {
          monitor->note_error("backward threw on rank 1 of 2: boom");
          if (goes_on) monitor->clear_error();
          return;
        }
        seen = timed_error_of([&] { collective("all_reduce", self.group); }).error;
      },
      kLongTimeout);
  CHECK(errors == std::vector<std::string>(2));
  CHECK_THAT(seen, ContainsText("rank 1 of 2 has ended, or left the process group"));
  const auto cause = ContainsText("group (rank 1: backward threw on rank 1 of 2: boom)");
  if (goes_on) {
    CHECK_THAT(seen, !cause);
  } else {
    CHECK_THAT(seen, cause);
  }
}

TEST_CASE("a rank that is only slow causes no error", "[comm][ranks][monitor]") {
  // Longer than finding that a peer is gone takes; and longer than the first check.
  const auto [way, late] = GENERATE(
      table<std::string, std::chrono::milliseconds>({{"all_reduce", 4500ms}, {"recv", 1500ms}}));
  CAPTURE(way);
  MeetingPoint nowhere(0);
  const auto errors = errors_of_ranks(3, [&, way = way, late = late](const Rank& self) {
    if (self.rank == 1) nowhere.be_late(late);
    if (way == "recv" && self.rank == 1) {
      for (const int other : {0, 2}) send(at::ones({4}), other, 0, self.group);
    } else {
      collective(way, self.group);
    }
    for (int i = 0; i < 3; ++i) sum(self.group);
  });
  CHECK(errors == std::vector<std::string>(3));
}

namespace {

/// How often each operation of a store was called.
class Counts {
 public:
  void count(const std::string& operation) {
    const std::lock_guard lock(mutex_);
    ++counts_[operation];
  }
  std::map<std::string, int> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(counts_, {});
  }

 private:
  std::mutex mutex_;
  std::map<std::string, int> counts_;
};

int total(const std::map<std::string, int>& counts) {
  int sum = 0;
  for (const auto& [operation, count] : counts) sum += count;
  return sum;
}

std::string to_text(const std::map<std::string, int>& counts) {
  std::string text;
  for (const auto& [operation, count] : counts) {
    text += operation + " " + std::to_string(count) + ", ";
  }
  return text;
}

using Asked = std::vector<std::map<std::string, int>>;  // by rank

/// The requests of each rank to the store while the last rank is late for a collective.
Asked asked_while_late(int size, std::chrono::milliseconds late) {
  MeetingPoint nowhere(0);
  return run_ranks<std::map<std::string, int>>(size, [&](const Rank& self) {
    const auto counts = std::make_shared<Counts>();
    const auto count = [counts](const std::string& operation) { counts->count(operation); };
    const auto group = group_over(self, c10::make_intrusive<WatchedStore>(self.store, count));
    DistributedDataParallel model(
        torch::nn::Linear(2, 2), DistributedDataParallelOptions().process_group(group));
    const auto step = [&] { model->forward(torch::ones({1, 2})).sum().backward(); };
    step();
    sum(group);
    counts->take();
    if (self.rank == self.size - 1) nowhere.be_late(late);
    for (int i = 0; i < 10; ++i) {
      step();
      sum(group);
    }
    // After the last collective of this group, a collective of another one ensures that each rank's
    // posted requests are done.
    sum(self.group);
    return counts->take();
  });
}

/// The requests of three runs, or "" where those of one are as expected. A busy machine that stalls
/// a rank for half a second makes the others ask more.
std::string unexpected_requests(
    int size, std::chrono::milliseconds late,
    const std::function<bool(const Asked&)>& is_expected) {
  std::string text;
  for (int run = 0; run < 8; ++run) {
    const auto asked = asked_while_late(size, late);
    if (is_expected(asked)) return "";
    for (size_t rank = 0; rank < asked.size(); ++rank) {
      text += "run " + std::to_string(run) + ", rank " + std::to_string(rank) + ": " +
              to_text(asked[rank]) + "\n";
    }
  }
  return text;
}

}  // namespace

TEST_CASE("a run without failures makes no requests to the store", "[comm][ranks][monitor]") {
  const auto are_none = [](const Asked& asked) {
    return std::all_of(
        asked.begin(), asked.end(), [](const auto& of_rank) { return of_rank.empty(); });
  };
  CHECK(unexpected_requests(3, 0ms, are_none) == "");
}

TEST_CASE("waits of less than two seconds write nothing to the store", "[comm][ranks][monitor]") {
  const auto are_checks = [](const Asked& asked) {
    return std::all_of(asked.begin(), asked.end() - 1, [](const auto& of_rank) {
      return of_rank.size() == 1 && of_rank.count("check") == 1;  // it has waited, and has checked
    });
  };
  CHECK(unexpected_requests(3, 1300ms, are_checks) == "");
}

TEST_CASE(
    "a waiting rank makes as few requests to the store in a large world as in a small one",
    "[comm][ranks][monitor]") {
  const int size = GENERATE(2, 8);
  // Five checks of two requests each; a report and the latest calls after two seconds, and a report
  // that clears it; once or twice, which rank looks for all, and once that it does not any more.
  // The rank that looks for all reads all reports, and the calls that changed. A busy machine may
  // add a check.
  const auto are_few = [](const Asked& asked) {
    int looking = 0;
    for (size_t rank = 0; rank + 1 < asked.size(); ++rank) {
      const auto count = [&of_rank = asked[rank]](const char* operation) {
        const auto found = of_rank.find(operation);
        return found == of_rank.end() ? 0 : found->second;
      };
      const int looks = count("multiGet");
      looking += looks > 0 ? 1 : 0;
      if (count("check") < 8 || total(asked[rank]) > 23) return false;
      if (count("set") > 3 || count("compareSet") > 5 || looks > 4) return false;
      if (asked[rank].size() != (looks > 0 ? 4 : 3)) return false;
    }
    return looking == 1 || looking == 2;  // one rank at a time
  };
  CHECK(unexpected_requests(size, 3s, are_few) == "");
}

namespace {

/// Makes stores for all ranks that stop answering, until this object is destroyed.
class StoppableStore {
 public:
  ~StoppableStore() { answer_.set_value(); }

  c10::intrusive_ptr<c10d::Store> over(const c10::intrusive_ptr<c10d::Store>& store) {
    return c10::make_intrusive<WatchedStore>(
        store, [stopped = stopped_, answers = answers_](const std::string&) {
          if (*stopped) answers.wait();
        });
  }
  void stop() { *stopped_ = true; }

 private:
  const std::shared_ptr<std::atomic<bool>> stopped_ = std::make_shared<std::atomic<bool>>(false);
  std::promise<void> answer_;
  const std::shared_future<void> answers_ = answer_.get_future().share();
};

}  // namespace

TEST_CASE(
    "if the store stops, waits end with the group's timeout and name the store",
    "[comm][ranks][errors][monitor]") {
  StoppableStore store;
  const auto seen = run_ranks<TimedError>(
      3,
      [&](const Rank& self) -> TimedError {
        auto group = group_over(self, store.over(self.store), 4s);
        sum(group);
        sum(self.group);
        store.stop();
        TimedError seen;
        if (self.rank != 1) seen = timed_error_of([&] { sum(group); });
        self.wait_until_others_end();
        const auto start = std::chrono::steady_clock::now();
        group.reset();
        TORCH_CHECK(std::chrono::steady_clock::now() - start < 20s, "the group's end took long");
        return seen;
      },
      kLongTimeout);
  for (const int rank : {0, 2}) {
    CAPTURE(rank);
    CHECK_THAT(
        seen[rank].error,
        ContainsText("the store has not answered for ") &&
            ContainsText("the process that hosts it is stopped, or cannot be reached"));
    CHECK(seen[rank].seconds > 3);
    CHECK(seen[rank].seconds < 20);
  }
}

TEST_CASE(
    "an exception leaves a group whose store has stopped in bounded time",
    "[comm][ranks][errors][monitor]") {
  StoppableStore store;
  const auto seen = run_ranks<TimedError>(
      2,
      [&](const Rank& self) {
        const auto seen = timed_error_of([&] {
          const auto group = group_over(self, store.over(self.store));
          sum(group);
          sum(self.group);
          store.stop();
          TORCH_CHECK(false, "user boom");
        });
        sum(self.group);
        return seen;
      },
      kLongTimeout);
  for (const auto& one : seen) {
    CHECK(one.error == "user boom");
    CHECK(one.seconds < 15);
  }
}

TEST_CASE("a rank that makes a subgroup throws the group's failure", "[ranks][errors]") {
  const auto errors = errors_of_ranks(
      2,
      [](const Rank& self) {
        if (self.rank == 1) {
          monitor_of(self.group)->fail("rank 1 cannot go on");
          return self.wait_until_others_end();
        }
        const auto seen = timed_error_of([&] { new_group({0, 1}, self.group); });
        TORCH_CHECK(seen.seconds < 5, "after ", seen.seconds, " s: ", seen.error);
        TORCH_CHECK(false, seen.error);
      },
      kLongTimeout);
  CHECK_THAT(errors[0], ContainsText("rank 1 cannot go on") && ContainsText("aborted"));
}

TEST_CASE("a rank that has finished may leave while another one is late", "[ranks][many]") {
  const auto sums = run_ranks<float>(
      3,
      [](const Rank& self) {
        if (self.rank == 2)
          std::this_thread::sleep_for(6s);  // longer than finding that a rank is gone takes
        std::vector<at::Tensor> all;
        while (self.rank == 0 && all.size() < 3) all.push_back(torch::zeros({1}));
        gather(all, torch::full({1}, self.rank + 1.0f), /*dst=*/0, self.group);
        return self.rank == 0 ? torch::cat(all).sum().item<float>() : 6.0f;
      },
      kLongTimeout);
  CHECK(sums == std::vector<float>{6, 6, 6});
}

}  // namespace ddp
