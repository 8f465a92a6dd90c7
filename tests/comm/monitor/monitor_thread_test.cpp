// The threads of a group's monitor.
#include <unistd.h>

#include <memory>
#include <mutex>
#include <set>
#include <string>

#include <ddp/collectives.h>
#include <ddp/internal/group_monitor.h>

#include "comm/watched_store.h"
#include "support/ranks.h"

#include "support/catch.h"

using ddp::testing::Rank;
using namespace std::chrono_literals;

namespace {

/// The threads that call a store, and how often they did.
class Callers {
 public:
  void call() {
    const std::lock_guard lock(mutex_);
    threads_.insert(gettid());
    ++calls_;
  }
  void forget() {
    const std::lock_guard lock(mutex_);
    threads_.clear();
    calls_ = 0;
  }
  int calls() {
    const std::lock_guard lock(mutex_);
    return calls_;
  }
  size_t threads() {
    const std::lock_guard lock(mutex_);
    return threads_.size();
  }

 private:
  std::mutex mutex_;
  std::set<pid_t> threads_;
  int calls_ = 0;
};

}  // namespace

TEST_CASE("a monitor makes all its requests to the store on one thread", "[comm][ranks]") {
  const auto threads = ddp::testing::run_ranks<size_t>(2, [](const Rank& self) {
    const auto callers = std::make_shared<Callers>();
    const auto group =
        ddp::make_process_group(ddp::ProcessGroupOptions()
                                    .backend("gloo")
                                    .store(c10::make_intrusive<ddp::testing::WatchedStore>(
                                        self.store, [callers](auto&) { callers->call(); }))
                                    .rank(self.rank)
                                    .world_size(self.size)
                                    .timeout(20s));
    callers->forget();
    // A waiting rank checks repeatedly: two requests per check.
    ddp::monitor_of(group)->poll(
        [&] { return callers->calls() >= 4; }, [] { return std::string("waiting"); });
    const auto seen = callers->threads();
    ddp::barrier(self.group);
    return seen;
  });
  CHECK(threads == std::vector<size_t>{1, 1});
}
