#include "store/bounded_store.h"

#include <algorithm>
#include <mutex>

#include <c10/util/ScopeExit.h>
#include <ddp/internal/text.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "store/tcp_store.h"

namespace ddp {
namespace {

// Added to the store's own timeout, so that an answer sent at the last moment can arrive.
constexpr auto kStoreGrace = std::chrono::seconds(1);

constexpr const char* kUnknownHost = "which all ranks share";

// To a store, 0 means "no timeout".
std::chrono::milliseconds limit_of(std::chrono::milliseconds timeout) {
  return timeout == c10d::Store::kNoTimeout ? std::chrono::milliseconds::max() : timeout;
}

}  // namespace

/// Whether the store's host answers, and a thread that asks it. Shared by all views of one store.
class BoundedStore::HostState {
 public:
  using TimePoint = Deadline::Clock::time_point;

  explicit HostState(std::string name) : name_(std::move(name)) {}

  const std::string& name() const { return name_; }

  /// Since when an abandoned operation has had no answer; nothing if all have been answered.
  std::optional<TimePoint> silent_since() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return abandoned_.expired() ? std::nullopt : std::make_optional(since_);
  }

  /// \param operation  expires when the operation ends.
  void record_abandoned(const std::weak_ptr<void>& operation, TimePoint since) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (abandoned_.expired()) since_ = since;
    abandoned_ = operation;
  }

  /// The idle thread, or a new one.
  std::unique_ptr<Executor> take_thread() {
    std::unique_ptr<Executor> idle;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      idle = std::move(idle_);
    }
    return idle && idle->has_thread() ? std::move(idle) : std::make_unique<Executor>();
  }

  /// \param thread  null if it was abandoned.
  void give_back(std::unique_ptr<Executor> thread) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (thread) idle_.swap(thread);
  }

 private:
  const std::string name_;
  std::mutex mutex_;               // guards the members below
  std::weak_ptr<void> abandoned_;  // the latest abandoned operation
  TimePoint since_;
  std::unique_ptr<Executor> idle_;  // may be null
};

BoundedStore::BoundedStore(StorePtr store, const std::string& host)
    : BoundedStore(std::move(store), std::make_shared<HostState>(host), std::nullopt) {}

BoundedStore::BoundedStore(
    StorePtr store, std::shared_ptr<HostState> host, std::optional<Deadline> deadline)
    : store_(std::move(store)), host_(std::move(host)), deadline_(deadline) {}

c10::intrusive_ptr<BoundedStore> BoundedStore::with_prefix(const std::string& prefix) const {
  return c10::intrusive_ptr<BoundedStore>::unsafe_steal_from_new(
      new BoundedStore(c10::make_intrusive<c10d::PrefixStore>(prefix, store_), host_, deadline_));
}

c10::intrusive_ptr<BoundedStore> BoundedStore::with_deadline(const Deadline& deadline) const {
  return c10::intrusive_ptr<BoundedStore>::unsafe_steal_from_new(
      new BoundedStore(store_, host_, deadline));
}

c10::intrusive_ptr<c10d::Store> clone_of(const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    return clone_store(*store);
  } catch (const std::exception&) {
    return store;
  }
}

c10::intrusive_ptr<BoundedStore> bounded(const BoundedStore::StorePtr& store) {
  if (auto* same = dynamic_cast<BoundedStore*>(store.get())) {
    return c10::intrusive_ptr<BoundedStore>::reclaim_copy(same);
  }
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    const auto innermost = prefixed->getUnderlyingNonPrefixStore();
    if (const auto* below = dynamic_cast<BoundedStore*>(innermost.get())) {
      return c10::intrusive_ptr<BoundedStore>::unsafe_steal_from_new(
          new BoundedStore(store, below->host_, std::nullopt));
    }
  }
  return c10::make_intrusive<BoundedStore>(store, kUnknownHost);
}

void BoundedStore::throw_silent(const char* name, Deadline::Clock::time_point since) const {
  const auto waited = Deadline::Clock::now() - since;
  throw readable_error<SilentStoreError>(
      DDP_HERE,
      ddp::str(
          "the store, ", host_->name(), ", did not answer for ",
          std::chrono::duration_cast<Milliseconds>(waited).count(), " ms (", name,
          "). Look whether its process or its host is stopped, swaps, or lost its network"));
}

template <typename Operation>
auto BoundedStore::run_operation(const char* name, Milliseconds patience, Operation operation) {
  if (deadline_) patience = std::min(patience, deadline_->left());
  if (const auto since = host_->silent_since()) throw_silent(name, *since);
  const auto start = Deadline::Clock::now();
  auto alive = std::make_shared<char>();
  const std::weak_ptr<void> pending = alive;
  auto thread = host_->take_thread();
  const auto give_back = c10::make_scope_exit([&] { host_->give_back(std::move(thread)); });
  auto result = thread->ask(
      [store = store_, operation = std::move(operation), alive = std::move(alive)] {
        return operation(*store);
      },
      Deadline::in(patience) + kStoreGrace);
  if (!result) {
    host_->record_abandoned(pending, start);
    thread->close(Milliseconds(0));
    thread = nullptr;
    throw_silent(name, start);
  }
  return std::move(*result);
}

template <typename Operation>
auto BoundedStore::run_operation(const char* name, Operation operation) {
  return run_operation(name, limit_of(getTimeout()), std::move(operation));
}

template <typename Operation>
void BoundedStore::run_without_result(const char* name, Operation operation) {
  run_operation(name, [operation = std::move(operation)](c10d::Store& store) {
    operation(store);
    return true;
  });
}

c10::intrusive_ptr<c10d::Store> BoundedStore::clone() {
  auto copy = run_operation("clone", [](c10d::Store& store) { return clone_store(store); });
  return c10::make_intrusive<BoundedStore>(std::move(copy), host_->name());
}

void BoundedStore::set(const std::string& key, const Bytes& value) {
  run_without_result("set", [key, value](c10d::Store& store) { store.set(key, value); });
}

BoundedStore::Bytes BoundedStore::compareSet(
    const std::string& key, const Bytes& expected, const Bytes& desired) {
  return run_operation("compareSet", [key, expected, desired](c10d::Store& store) {
    return store.compareSet(key, expected, desired);
  });
}

BoundedStore::Bytes BoundedStore::get(const std::string& key) {
  return run_operation("get", [key](c10d::Store& store) { return store.get(key); });
}

int64_t BoundedStore::add(const std::string& key, int64_t value) {
  return run_operation("add", [key, value](c10d::Store& store) { return store.add(key, value); });
}

bool BoundedStore::deleteKey(const std::string& key) {
  return run_operation("deleteKey", [key](c10d::Store& store) { return store.deleteKey(key); });
}

bool BoundedStore::check(const Keys& keys) {
  return run_operation("check", [keys](c10d::Store& store) { return store.check(keys); });
}

int64_t BoundedStore::getNumKeys() {
  return run_operation("getNumKeys", [](c10d::Store& store) { return store.getNumKeys(); });
}

void BoundedStore::wait(const Keys& keys) { wait(keys, getTimeout()); }

void BoundedStore::wait(const Keys& keys, const Milliseconds& timeout) {
  const auto of_store = deadline_ ? std::min(limit_of(timeout), deadline_->left()) : timeout;
  run_operation("wait", limit_of(of_store), [keys, of_store](c10d::Store& store) {
    store.wait(keys, of_store);
    return true;
  });
}

const BoundedStore::Milliseconds& BoundedStore::getTimeout() const noexcept {
  return store_->getTimeout();
}

void BoundedStore::setTimeout(const Milliseconds& timeout) { store_->setTimeout(timeout); }

void BoundedStore::append(const std::string& key, const Bytes& value) {
  run_without_result("append", [key, value](c10d::Store& store) { store.append(key, value); });
}

std::vector<BoundedStore::Bytes> BoundedStore::multiGet(const Keys& keys) {
  return run_operation("multiGet", [keys](c10d::Store& store) { return store.multiGet(keys); });
}

void BoundedStore::multiSet(const Keys& keys, const std::vector<Bytes>& values) {
  run_without_result(
      "multiSet", [keys, values](c10d::Store& store) { store.multiSet(keys, values); });
}

bool BoundedStore::hasExtendedApi() const { return store_->hasExtendedApi(); }

void BoundedStore::queuePush(const std::string& key, const Bytes& value) {
  run_without_result(
      "queuePush", [key, value](c10d::Store& store) { store.queuePush(key, value); });
}

BoundedStore::Bytes BoundedStore::queuePop(const std::string& key, bool block) {
  return run_operation(
      "queuePop", [key, block](c10d::Store& store) { return store.queuePop(key, block); });
}

int64_t BoundedStore::queueLen(const std::string& key) {
  return run_operation("queueLen", [key](c10d::Store& store) { return store.queueLen(key); });
}

std::vector<std::string> BoundedStore::listKeys() {
  return run_operation("listKeys", [](c10d::Store& store) { return store.listKeys(); });
}

}  // namespace ddp
