#include "comm/base/executor.h"
#include "support/error_of.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include <c10/util/Exception.h>

#include "support/catch.h"

using ddp::bounded_call;
using ddp::Executor;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

TEST_CASE("an executor runs all pushed jobs in order before it ends", "[comm][pure]") {
  std::string order;
  {
    Executor executor;
    executor.push([&] {
      std::this_thread::sleep_for(20ms);
      order += 'a';
    });
    for (const char job : {'b', 'c'}) executor.push([&order, job] { order += job; });
  }
  CHECK(order == "abc");
}

TEST_CASE("where no thread can start the text says which limit to raise", "[comm][pure]") {
  // A stack that no process has memory for.
  pthread_attr_t before, huge;
  REQUIRE(pthread_getattr_default_np(&before) == 0);
  REQUIRE(pthread_attr_init(&huge) == 0);
  REQUIRE(pthread_attr_setstacksize(&huge, size_t{1} << 50) == 0);
  REQUIRE(pthread_setattr_default_np(&huge) == 0);
  const auto text = ddp::testing::error_of<std::system_error>([] { const Executor executor; });
  REQUIRE(pthread_setattr_default_np(&before) == 0);
  CHECK_THAT(text, ContainsText("threads: expected to start one more"));
  CHECK_THAT(text, ContainsText("`ulimit -u`"));
}

TEST_CASE("an executor that is closed accepts no jobs", "[comm][pure]") {
  std::atomic<int> done = 0;
  Executor executor;
  CHECK(executor.push([&] { ++done; }));
  executor.close();
  CHECK_FALSE(executor.push([&] { ++done; }));
  CHECK_FALSE(executor.ask([&] { return ++done; }, Clock::now() + 20s).has_value());
  CHECK(done == 1);
}

TEST_CASE("a job may destroy its executor, or own it", "[comm][pure]") {
  const bool owned = GENERATE(false, true);
  std::promise<void> destroyed;
  std::promise<void> made;
  auto& executor = *new Executor;
  std::shared_ptr<Executor> owner(&executor, [&](Executor* last) {
    delete last;
    destroyed.set_value();
  });
  executor.push([&, last = owned ? owner : nullptr] {
    made.get_future().wait();
    if (!owned) owner = nullptr;
  });
  if (owned) owner = nullptr;
  made.set_value();
  CHECK(destroyed.get_future().wait_for(20s) == std::future_status::ready);
}

TEST_CASE("an executor abandons a job that does not end", "[comm][pure]") {
  std::promise<void> release;
  const auto used = std::make_shared<int>(3);
  {
    Executor executor;
    executor.push([used, released = release.get_future().share()] { released.wait(); });
    executor.close(20ms);
  }
  CHECK(used.use_count() == 2);
  release.set_value();
  while (used.use_count() > 1) std::this_thread::yield();
}

TEST_CASE("a bounded call returns and throws like the call itself", "[comm][pure]") {
  const auto soon = Clock::now() + 20s;
  CHECK(bounded_call([] { return 3; }, soon) == 3);
  const auto refuse = []() -> int { TORCH_CHECK_VALUE(false, "no"); };
  CHECK_THROWS_AS(bounded_call(refuse, soon), c10::ValueError);
}

TEST_CASE("a bounded call has released its captures when it returns", "[comm][pure]") {
  const auto lent = std::make_shared<int>(3);
  CHECK(bounded_call([lent] { return *lent; }, Clock::now() + 20s) == 3);
  CHECK(lent.use_count() == 1);
  const auto refuse = [lent]() -> int { TORCH_CHECK_VALUE(false, "no"); };
  CHECK_THROWS(bounded_call(std::move(refuse), Clock::now() + 20s));
  CHECK(lent.use_count() == 2);  // `refuse`, which was const and so copied
}

TEST_CASE("an executor has released what a call owned when it answers", "[comm][pure]") {
  const auto lent = std::make_shared<int>(3);
  Executor executor;
  for (int time = 0; time < 100; ++time) {
    executor.ask([lent] { return *lent; }, Clock::now() + 20s);
    REQUIRE(lent.use_count() == 1);
  }
}

TEST_CASE("a bounded call that does not end is abandoned", "[comm][pure]") {
  std::promise<void> release;
  std::promise<void> ended;
  auto end = ended.get_future();
  auto state = std::make_shared<std::pair<std::shared_future<void>, std::promise<void>>>(
      release.get_future().share(), std::move(ended));
  const auto result = bounded_call(
      [state = std::move(state)] {
        state->first.wait();
        state->second.set_value();
        return 3;
      },
      Clock::now() + 50ms);
  CHECK_FALSE(result.has_value());
  release.set_value();
  CHECK(end.wait_for(20s) == std::future_status::ready);
}
