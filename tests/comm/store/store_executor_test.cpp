// The store's thread: a store that does not answer blocks it, but no other thread.
#include <functional>
#include <future>
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/store/bounded_store.h"
#include "comm/watched_store.h"
#include "support/error_of.h"
#include "support/processes.h"

#include "support/catch.h"

using namespace std::chrono_literals;
using ddp::StoreExecutor;
using namespace ddp::testing;

namespace {

/// A store whose calls do not return before open().
class ClosedStore {
 public:
  ClosedStore()
      : store_(c10::make_intrusive<WatchedStore>(
            inner_, [opened = open_.get_future().share()](auto&) { opened.wait(); })) {}

  const c10::intrusive_ptr<WatchedStore>& get() const { return store_; }
  void open() { open_.set_value(); }
  /// How many references exist besides this object's.
  size_t users() const { return store_.use_count() - 1; }

 private:
  const c10::intrusive_ptr<c10d::Store> inner_ = c10::make_intrusive<c10d::HashStore>();
  std::promise<void> open_;
  const c10::intrusive_ptr<WatchedStore> store_;
};

double seconds_of(const std::function<void()>& body) { return timed_error_of(body).seconds; }

}  // namespace

TEST_CASE("the store's thread runs jobs in order and returns answers", "[comm]") {
  auto store = c10::make_intrusive<c10d::HashStore>();
  StoreExecutor executor(store);
  executor.post([](c10d::Store& s) { s.set("key", "first"); });
  executor.post([](c10d::Store& s) { s.set("key", "second"); });
  const auto answer =
      executor.ask<std::string>([](c10d::Store& s) { return s.get_to_str("key"); }, 30s);
  CHECK(answer == "second");
}

TEST_CASE("the store's thread continues after a job that throws", "[comm][errors]") {
  StoreExecutor executor(c10::make_intrusive<c10d::HashStore>());
  const auto throws = [](c10d::Store&) -> int { TORCH_CHECK(false, "job boom"); };
  executor.post(throws);
  CHECK_THAT(error_of([&] { executor.ask<int>(throws, 30s); }), ContainsText("job boom"));
  CHECK(executor.ask<int>([](c10d::Store&) { return 7; }, 30s) == 7);
}

TEST_CASE("posted jobs are done before the executor is destroyed", "[comm]") {
  auto store = c10::make_intrusive<c10d::HashStore>();
  {
    StoreExecutor executor(store);
    executor.post([](c10d::Store& s) { s.set("key", "last job"); });
  }
  CHECK(store->check({"key"}));
}

TEST_CASE("a store that does not answer blocks no caller", "[comm][errors]") {
  ClosedStore closed;
  auto executor = std::make_unique<StoreExecutor>(closed.get());
  CHECK(seconds_of([&] { executor->post([](c10d::Store& s) { s.set("key", "value"); }); }) < 5);
  std::optional<bool> answer = true;
  CHECK(seconds_of([&] {
          answer = executor->ask<bool>([](c10d::Store& s) { return s.check({"key"}); }, 100ms);
        }) < 5);
  CHECK_FALSE(answer);
  CHECK(seconds_of([&] { executor.reset(); }) < 5);
  CHECK(closed.users() > 0);
  // The abandoned thread ends once the store answers.
  closed.open();
  CHECK(eventually([&] { return closed.users() == 0; }));
}
