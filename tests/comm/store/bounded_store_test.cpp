#include "comm/store/bounded_store.h"

#include <unistd.h>

#include <condition_variable>
#include <future>
#include <mutex>
#include <thread>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/store/startup_barrier.h"

#include "support/catch.h"

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
  /// The thread of the latest check(); a later thread has another number.
  pid_t thread() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return thread_;
  }

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    wait_for_thaw();
    HashStore::set(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    wait_for_thaw();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      thread_ = gettid();
    }
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
  pid_t thread_ = 0;
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

TEST_CASE("operations use one thread, unless they run at the same time", "[comm][pure]") {
  const Frozen frozen;
  const auto use = [&](c10d::Store& store) {
    store.check({"key"});
    return frozen.store->thread();
  };
  const auto thread = use(*frozen.bounded);
  CHECK(thread != gettid());
  CHECK(use(*frozen.bounded) == thread);
  CHECK(use(*frozen.bounded->with_prefix("a")->with_deadline(Deadline(20s))) == thread);
  CHECK_THROWS_AS(frozen.bounded->wait({"none"}, 10ms), c10::Error);
  CHECK(use(*frozen.bounded) == thread);

  auto waits = std::async(std::launch::async, [&] { frozen.bounded->wait({"key"}, 20s); });
  frozen.bounded->set("key", std::vector<uint8_t>{});  // although the other operation waits
  waits.get();
}

TEST_CASE("an operation that is not answered costs the store its thread", "[comm][errors]") {
  Frozen frozen;
  frozen.bounded->check({"key"});
  const auto thread = frozen.store->thread();
  frozen.store->freeze();
  CHECK_FALSE(answers(*frozen.bounded->with_deadline(Deadline(50ms))));
  frozen.store->thaw();
  while (!answers(*frozen.bounded)) std::this_thread::yield();
  CHECK(frozen.store->thread() != thread);
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
    ddp::run_startup_barrier({frozen.bounded, 1, 2, Deadline(4s), "test"});
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
