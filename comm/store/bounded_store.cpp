#include "store/bounded_store.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include <c10/util/ScopeExit.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "store/bounded_call.h"

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

/// Whether the store's host answers. Shared by all views of one store.
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

 private:
  const std::string name_;
  std::mutex mutex_;
  std::weak_ptr<void> abandoned_;  // the latest abandoned operation
  TimePoint since_;
};

/// The operations of one `run`: begun by the run's thread, checked by the thread that waits for it.
class BoundedStore::Session {
 public:
  using TimePoint = Deadline::Clock::time_point;

  /// Records an operation that must be answered by `due`.
  ///
  /// \return  false if the operation needs a thread of its own: the run is over, or another thread
  ///         of the run has an operation pending.
  /// \throws SilentStoreError  if the run was abandoned.
  bool begin(const char* name, TimePoint due) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_abandoned_) {
      throw readable_error<SilentStoreError>(DDP_HERE, "its run was abandoned");
    }
    if (is_over_ || name_ != nullptr) return false;
    name_ = name;
    since_ = Deadline::Clock::now();
    due_ = due;
    return true;
  }

  void end() {
    const std::lock_guard<std::mutex> lock(mutex_);
    name_ = nullptr;
  }

  /// The operation that was not answered, and its start. Valid once `next_check` returned nothing.
  std::pair<const char*, TimePoint> unanswered() const { return unanswered_; }

  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_over_ = true;
  }

  /// When to check again; nothing if an operation was not answered in time.
  std::optional<TimePoint> next_check() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto now = Deadline::Clock::now();
    is_abandoned_ = name_ != nullptr && now > due_;
    if (!is_abandoned_) return now + kCheckInterval;
    unanswered_ = {name_, since_};
    return std::nullopt;
  }

 private:
  static constexpr std::chrono::milliseconds kCheckInterval{200};

  std::mutex mutex_;
  const char* name_ = nullptr;  // of the pending operation; null: none
  TimePoint since_;
  TimePoint due_;
  std::pair<const char*, TimePoint> unanswered_;  // used only by the waiting thread
  bool is_over_ = false;
  bool is_abandoned_ = false;
};

BoundedStore::BoundedStore(StorePtr store, const std::string& host)
    : BoundedStore(std::move(store), std::make_shared<HostState>(host), std::nullopt) {}

BoundedStore::BoundedStore(
    StorePtr store, std::shared_ptr<HostState> host, std::optional<Deadline> deadline,
    std::shared_ptr<Session> session)
    : store_(std::move(store)),
      host_(std::move(host)),
      deadline_(deadline),
      session_(std::move(session)) {}

c10::intrusive_ptr<BoundedStore> BoundedStore::with_prefix(const std::string& prefix) const {
  return c10::intrusive_ptr<BoundedStore>::unsafe_steal_from_new(
      new BoundedStore(c10::make_intrusive<c10d::PrefixStore>(prefix, store_), host_, deadline_));
}

c10::intrusive_ptr<BoundedStore> BoundedStore::with_deadline(const Deadline& deadline) const {
  return c10::intrusive_ptr<BoundedStore>::unsafe_steal_from_new(
      new BoundedStore(store_, host_, deadline, session_));
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

template <typename Call, typename Until>
auto BoundedStore::call_in_time(
    const char* name, Call call, const Until& until, const Unanswered& unanswered) const {
  if (const auto since = host_->silent_since()) throw_silent(name, *since);
  auto alive = std::make_shared<char>();
  const std::weak_ptr<void> pending = alive;
  auto result = bounded_call(
      [call = std::move(call), alive = std::move(alive)]() mutable { return call(); }, until);
  if (!result) {
    const auto [operation, since] = unanswered();
    host_->record_abandoned(pending, since);
    throw_silent(operation, since);
  }
  return std::move(*result);
}

void BoundedStore::run(std::function<void(const StorePtr& store)> work) const {
  const auto session = std::make_shared<Session>();
  const auto close = c10::make_scope_exit([&] { session->close(); });
  const auto store =
      StorePtr::unsafe_steal_from_new(new BoundedStore(store_, host_, deadline_, session));
  call_in_time(
      "run",
      [work = std::move(work), store] {
        work(store);
        return true;
      },
      [&] { return session->next_check(); }, [&] { return session->unanswered(); });
}

template <typename Operation>
auto BoundedStore::run_operation(const char* name, Milliseconds patience, Operation operation) {
  if (deadline_) patience = std::min(patience, deadline_->left());
  const auto start = Deadline::Clock::now();
  const auto due = Deadline::in(patience) + kStoreGrace;
  if (session_ && session_->begin(name, due)) {
    const auto end = c10::make_scope_exit([&] { session_->end(); });
    return operation(*store_);
  }
  return call_in_time(
      name, [store = store_, operation = std::move(operation)] { return operation(*store); }, due,
      [&] { return std::make_pair(name, start); });
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
  auto copy = run_operation("clone", [](c10d::Store& store) { return store.clone(); });
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
