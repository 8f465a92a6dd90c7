#include "bounded_store.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "bounded_call.h"

namespace ddp {
namespace {

// Beyond the time that the store itself has, for the answer to arrive.
constexpr auto kAnswerGrace = std::chrono::seconds(1);

constexpr const char* kUnknownHost = "which all ranks share";

// 0 means "no timeout" to a store.
std::chrono::milliseconds limit_of(std::chrono::milliseconds timeout) {
  return timeout == c10d::Store::kNoTimeout ? std::chrono::milliseconds::max() : timeout;
}

}  // namespace

class BoundedStore::Host {
 public:
  explicit Host(std::string name) : name_(std::move(name)) {}

  const std::string& name() const { return name_; }

  /// Whether an operation was left behind and has not returned.
  bool is_silent() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return !left_behind_.expired();
  }

  /// \param alive  owned by the operation alone.
  void leave_behind(const std::weak_ptr<void>& alive) {
    const std::lock_guard<std::mutex> lock(mutex_);
    left_behind_ = alive;
  }

 private:
  const std::string name_;
  std::mutex mutex_;
  std::weak_ptr<void> left_behind_;  // the last one; guarded by mutex_
};

BoundedStore::BoundedStore(StorePtr store, const std::string& host)
    : BoundedStore(std::move(store), std::make_shared<Host>(host), std::nullopt) {}

BoundedStore::BoundedStore(
    StorePtr store, std::shared_ptr<Host> host, std::optional<Deadline> deadline)
    : store_(std::move(store)), host_(std::move(host)), deadline_(deadline) {}

c10::intrusive_ptr<BoundedStore> BoundedStore::within(const std::string& prefix) const {
  return c10::intrusive_ptr<BoundedStore>::reclaim(
      new BoundedStore(c10::make_intrusive<c10d::PrefixStore>(prefix, store_), host_, deadline_));
}

c10::intrusive_ptr<BoundedStore> BoundedStore::by(const Deadline& deadline) const {
  return c10::intrusive_ptr<BoundedStore>::reclaim(new BoundedStore(store_, host_, deadline));
}

c10::intrusive_ptr<BoundedStore> bounded(const BoundedStore::StorePtr& store) {
  if (auto* same = dynamic_cast<BoundedStore*>(store.get())) {
    return c10::intrusive_ptr<BoundedStore>::reclaim_copy(same);
  }
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    const auto innermost = prefixed->getUnderlyingNonPrefixStore();
    if (const auto* below = dynamic_cast<BoundedStore*>(innermost.get())) {
      return c10::intrusive_ptr<BoundedStore>::reclaim(
          new BoundedStore(store, below->host_, std::nullopt));
    }
  }
  return c10::make_intrusive<BoundedStore>(store, kUnknownHost);
}

template <typename Operation>
auto BoundedStore::ask(const char* name, Milliseconds patience, Operation operation) {
  using Clock = Deadline::Clock;
  const auto start = Clock::now();
  const auto throw_silent = [&] {
    const auto waited = std::chrono::duration_cast<Milliseconds>(Clock::now() - start);
    throw SilentStoreError(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
        c10::str(
            "the store, ", host_->name(), ", did not answer for ", waited.count(), " ms (", name,
            "). Look whether its process or its host is stopped, swaps, or lost its network"));
  };
  if (host_->is_silent()) throw_silent();
  if (deadline_) patience = std::min(patience, deadline_->left());
  auto alive = std::make_shared<char>();
  const std::weak_ptr<void> pending = alive;
  auto result = bounded_call(
      [store = store_, operation = std::move(operation), alive = std::move(alive)] {
        return operation(*store);
      },
      Deadline::in(patience) + kAnswerGrace);
  if (!result) {
    host_->leave_behind(pending);
    throw_silent();
  }
  return std::move(*result);
}

template <typename Operation>
auto BoundedStore::ask(const char* name, Operation operation) {
  return ask(name, limit_of(getTimeout()), std::move(operation));
}

template <typename Operation>
void BoundedStore::tell(const char* name, Operation operation) {
  ask(name, [operation = std::move(operation)](c10d::Store& store) {
    operation(store);
    return true;
  });
}

c10::intrusive_ptr<c10d::Store> BoundedStore::clone() {
  auto copy = ask("clone", [](c10d::Store& store) { return store.clone(); });
  return c10::make_intrusive<BoundedStore>(std::move(copy), host_->name());
}

void BoundedStore::set(const std::string& key, const Bytes& value) {
  tell("set", [key, value](c10d::Store& store) { store.set(key, value); });
}

BoundedStore::Bytes BoundedStore::compareSet(
    const std::string& key, const Bytes& expected, const Bytes& desired) {
  return ask("compareSet", [key, expected, desired](c10d::Store& store) {
    return store.compareSet(key, expected, desired);
  });
}

BoundedStore::Bytes BoundedStore::get(const std::string& key) {
  return ask("get", [key](c10d::Store& store) { return store.get(key); });
}

int64_t BoundedStore::add(const std::string& key, int64_t value) {
  return ask("add", [key, value](c10d::Store& store) { return store.add(key, value); });
}

bool BoundedStore::deleteKey(const std::string& key) {
  return ask("deleteKey", [key](c10d::Store& store) { return store.deleteKey(key); });
}

bool BoundedStore::check(const Keys& keys) {
  return ask("check", [keys](c10d::Store& store) { return store.check(keys); });
}

int64_t BoundedStore::getNumKeys() {
  return ask("getNumKeys", [](c10d::Store& store) { return store.getNumKeys(); });
}

void BoundedStore::wait(const Keys& keys) { wait(keys, getTimeout()); }

void BoundedStore::wait(const Keys& keys, const Milliseconds& timeout) {
  const auto of_store = deadline_ ? std::min(limit_of(timeout), deadline_->left()) : timeout;
  ask("wait", limit_of(of_store), [keys, of_store](c10d::Store& store) {
    store.wait(keys, of_store);
    return true;
  });
}

const BoundedStore::Milliseconds& BoundedStore::getTimeout() const noexcept {
  return store_->getTimeout();
}

void BoundedStore::setTimeout(const Milliseconds& timeout) { store_->setTimeout(timeout); }

void BoundedStore::append(const std::string& key, const Bytes& value) {
  tell("append", [key, value](c10d::Store& store) { store.append(key, value); });
}

std::vector<BoundedStore::Bytes> BoundedStore::multiGet(const Keys& keys) {
  return ask("multiGet", [keys](c10d::Store& store) { return store.multiGet(keys); });
}

void BoundedStore::multiSet(const Keys& keys, const std::vector<Bytes>& values) {
  tell("multiSet", [keys, values](c10d::Store& store) { store.multiSet(keys, values); });
}

bool BoundedStore::hasExtendedApi() const { return store_->hasExtendedApi(); }

void BoundedStore::queuePush(const std::string& key, const Bytes& value) {
  tell("queuePush", [key, value](c10d::Store& store) { store.queuePush(key, value); });
}

BoundedStore::Bytes BoundedStore::queuePop(const std::string& key, bool block) {
  return ask("queuePop", [key, block](c10d::Store& store) { return store.queuePop(key, block); });
}

int64_t BoundedStore::queueLen(const std::string& key) {
  return ask("queueLen", [key](c10d::Store& store) { return store.queueLen(key); });
}

std::vector<std::string> BoundedStore::listKeys() {
  return ask("listKeys", [](c10d::Store& store) { return store.listKeys(); });
}

}  // namespace ddp
