#include "comm/store/bounded_store.h"

#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/store/bounded_call.h"
#include "comm/store/startup_barrier.h"

#include "support/catch.h"

using ddp::bounded_call;
using ddp::BoundedStore;
using ddp::Deadline;
using ddp::SilentStoreError;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

namespace {

/// A store that does not answer while it is frozen, like a TCPStore whose process is stopped.
class FreezableStore : public c10d::HashStore {
 public:
  void freeze() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_frozen_ = true;
  }
  void thaw() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_frozen_ = false;
    }
    thawed_.notify_all();
  }

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    wait_for_thaw();
    HashStore::set(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    wait_for_thaw();
    return HashStore::check(keys);
  }

 private:
  void wait_for_thaw() {
    std::unique_lock<std::mutex> lock(mutex_);
    thawed_.wait(lock, [&] { return !is_frozen_; });
  }

  std::mutex mutex_;
  std::condition_variable thawed_;
  bool is_frozen_ = false;
};

struct Frozen {
  c10::intrusive_ptr<FreezableStore> store = c10::make_intrusive<FreezableStore>();
  c10::intrusive_ptr<BoundedStore> bounded =
      c10::make_intrusive<BoundedStore>(store, "which rank 0 hosts");
};

template <typename Call>
Clock::duration time_of(const Call& call) {
  const auto start = Clock::now();
  call();
  return Clock::now() - start;
}

bool answers(c10d::Store& store) {
  try {
    store.check({"key"});
    return true;
  } catch (const SilentStoreError&) {
    return false;
  }
}

}  // namespace

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

TEST_CASE("a bounded store behaves like the wrapped store while that answers", "[comm][pure]") {
  const Frozen frozen;
  const auto prefixed = frozen.bounded->with_prefix("a");
  c10d::Store& store = *prefixed;
  const c10::intrusive_ptr<c10d::Store> plain = frozen.store;
  plain->set("a/key", std::string("value"));
  CHECK(store.get_to_str("key") == "value");
  CHECK(store.add("count", 2) == 2);
  CHECK(store.check({"key", "count"}));
  CHECK_FALSE(store.check({"none"}));
  CHECK(store.deleteKey("key"));
  CHECK_FALSE(plain->check({"a/key"}));
  CHECK_THROWS_AS(store.wait({"none"}, 10ms), c10::Error);
}

TEST_CASE("a store that does not answer is an error that names its host", "[comm][errors]") {
  Frozen frozen;
  frozen.store->setTimeout(300ms);
  frozen.store->freeze();
  const auto took = time_of([&] {
    CHECK_THROWS_WITH(
        frozen.bounded->check({"key"}),
        ContainsText("the store, which rank 0 hosts, did not answer for ") &&
            ContainsText(" ms (check). Look whether its process or its host is stopped"));
  });
  CHECK(took >= 300ms);
  CHECK(took < 10s);
  // Later operations do not wait for the same answer.
  frozen.store->setTimeout(50s);
  const auto again = time_of([&] {
    CHECK_THROWS_AS(frozen.bounded->with_prefix("b")->set("key", {}), SilentStoreError);
    CHECK_THROWS_AS(frozen.bounded->check({"key"}), SilentStoreError);
  });
  CHECK(again < 10s);
  frozen.store->thaw();
  while (!answers(*frozen.bounded)) std::this_thread::yield();
  CHECK_FALSE(frozen.bounded->check({"key"}));
}

TEST_CASE("all operations of a run use one thread", "[comm][pure]") {
  const Frozen frozen;
  c10::intrusive_ptr<c10d::Store> kept;
  std::set<std::thread::id> threads;
  frozen.bounded->run([&](const auto& store) {
    threads.insert(std::this_thread::get_id());
    store->set("key", std::vector<uint8_t>{});
    store->wait({"key"}, 20s);
    kept = store;
  });
  CHECK(threads.count(std::this_thread::get_id()) == 0);
  CHECK(kept->check({"key"}));
  CHECK_THROWS_AS(
      frozen.bounded->run([](const auto&) { TORCH_CHECK_VALUE(false, "no"); }), c10::ValueError);
}

TEST_CASE("a run whose operation is not answered is abandoned", "[comm][errors]") {
  Frozen frozen;
  frozen.store->setTimeout(100ms);
  frozen.store->freeze();
  std::promise<std::string> went_on;
  auto end = went_on.get_future();
  const auto shared = std::make_shared<std::promise<std::string>>(std::move(went_on));
  const auto took = time_of([&] {
    CHECK_THROWS_WITH(
        frozen.bounded->run([shared](const auto& store) {
          store->check({"key"});  // answered late
          try {
            store->set("visible", std::vector<uint8_t>{});
            shared->set_value("set");
          } catch (const SilentStoreError&) {
            shared->set_value("refused");
          }
        }),
        ContainsText("which rank 0 hosts, did not answer for ") && ContainsText(" ms (check)"));
  });
  CHECK(took < 10s);
  CHECK_THROWS_AS(frozen.bounded->run([](const auto&) {}), SilentStoreError);
  frozen.store->thaw();
  CHECK(end.get() == "refused");
  CHECK_FALSE(frozen.store->check({"visible"}));
}

TEST_CASE("a run that waits for something other than the store is not abandoned", "[comm]") {
  Frozen frozen;
  frozen.store->setTimeout(1ms);
  bool is_done = false;
  // Longer than the limit of an operation.
  const auto time = 1ms + 1s + 300ms;
  frozen.bounded->run([&](const auto& store) {
    store->check({"key"});
    std::this_thread::sleep_for(time);
    is_done = !store->check({"key"});
  });
  CHECK(is_done);
}

TEST_CASE("a deadline ends an operation before the store's timeout", "[comm][errors]") {
  Frozen frozen;
  frozen.store->setTimeout(50s);
  frozen.store->freeze();
  const auto took = time_of([&] {
    CHECK_THROWS_AS(
        frozen.bounded->with_deadline(Deadline(200ms))->check({"key"}), SilentStoreError);
  });
  CHECK(took < 10s);
  frozen.store->thaw();
}

TEST_CASE("prefixes around a bounded store keep the name of its host", "[comm][errors]") {
  Frozen frozen;
  frozen.store->setTimeout(50s);
  const auto prefixed = c10::make_intrusive<c10d::PrefixStore>(
      "outer", c10::make_intrusive<c10d::PrefixStore>("inner", frozen.bounded));
  const auto store = ddp::bounded(prefixed);
  store->set("key", {});
  CHECK(frozen.store->check({"inner/outer/key"}));
  CHECK(ddp::bounded(store).get() == store.get());
  frozen.store->freeze();
  CHECK_THROWS_WITH(
      store->with_deadline(Deadline(100ms))->check({"key"}),
      ContainsText("the store, which rank 0 hosts"));
  frozen.store->thaw();
}

TEST_CASE("a startup barrier over a store that freezes ends in time", "[comm][errors]") {
  Frozen frozen;
  frozen.store->setTimeout(50s);
  auto call = std::async(std::launch::async, [&] {
    ddp::run_startup_barrier({frozen.bounded, 1, 2, Deadline(500ms), "test"});
  });
  while (!frozen.store->HashStore::check({"open"})) std::this_thread::yield();
  frozen.store->freeze();
  const auto took = time_of([&] {
    CHECK_THROWS_WITH(
        call.get(), ContainsText("test on rank 1 of 2: the store, which rank 0 hosts, did not") &&
                        ContainsText("lost its network."));
  });
  CHECK(took < 10s);
  frozen.store->thaw();
}

TEST_CASE("unbounded() returns the wrapped store", "[comm][pure]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const BoundedStore bounded(store, "which the test hosts");
  CHECK(bounded.unbounded() == store);
  bounded.with_prefix("prefix")->unbounded()->set("key", std::string("value"));
  CHECK(store->get_to_str("prefix/key") == "value");
}
