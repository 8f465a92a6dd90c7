#include "bounded_store.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include <c10/util/ScopeExit.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>
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

/// Whether the host answers.
class BoundedStore::Host {
 public:
  using TimePoint = Deadline::Clock::time_point;

  explicit Host(std::string name) : name_(std::move(name)) {}

  const std::string& name() const { return name_; }

  /// Since when an operation that was left behind has had no answer; nothing when all have one.
  std::optional<TimePoint> silent_since() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return left_behind_.expired() ? std::nullopt : std::make_optional(since_);
  }

  /// \param operation  alive as long as the operation is under way.
  void leave_behind(const std::weak_ptr<void>& operation, TimePoint since) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (left_behind_.expired()) since_ = since;
    left_behind_ = operation;
  }

 private:
  const std::string name_;
  std::mutex mutex_;
  std::weak_ptr<void> left_behind_;  // the last one
  TimePoint since_;
};

/// The operations of one `run`, as seen by its thread and by the thread that waits for it.
class BoundedStore::Session {
 public:
  using TimePoint = Deadline::Clock::time_point;

  /// Before an operation that has to be answered by `due`.
  ///
  /// \return  false when the operation needs a thread of its own: the run is over, or another
  /// thread
  ///         of it has an operation under way.
  /// \throws SilentStoreError  when the run was left behind.
  bool begin(const char* name, TimePoint due) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_left_behind_) {
      throw readable_error<SilentStoreError>(DDP_HERE, "nobody waits for it any more");
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

  /// The operation that was not answered, and when it began: once `next_look` returned nothing.
  std::pair<const char*, TimePoint> unanswered() const { return unanswered_; }

  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_over_ = true;
  }

  /// When to look again; nothing once an operation was not answered.
  std::optional<TimePoint> next_look() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto now = Deadline::Clock::now();
    is_left_behind_ = name_ != nullptr && now > due_;
    if (!is_left_behind_) return now + kBetweenLooks;
    unanswered_ = {name_, since_};
    return std::nullopt;
  }

 private:
  static constexpr std::chrono::milliseconds kBetweenLooks{200};

  std::mutex mutex_;
  const char* name_ = nullptr;  // of the operation under way
  TimePoint since_;
  TimePoint due_;
  std::pair<const char*, TimePoint> unanswered_;  // for the thread that waits alone
  bool is_over_ = false;
  bool is_left_behind_ = false;
};

BoundedStore::BoundedStore(StorePtr store, const std::string& host)
    : BoundedStore(std::move(store), std::make_shared<Host>(host), std::nullopt) {}

BoundedStore::BoundedStore(
    StorePtr store, std::shared_ptr<Host> host, std::optional<Deadline> deadline,
    std::shared_ptr<Session> session)
    : store_(std::move(store)),
      host_(std::move(host)),
      deadline_(deadline),
      session_(std::move(session)) {}

c10::intrusive_ptr<BoundedStore> BoundedStore::within(const std::string& prefix) const {
  return c10::intrusive_ptr<BoundedStore>::unsafe_steal_from_new(
      new BoundedStore(c10::make_intrusive<c10d::PrefixStore>(prefix, store_), host_, deadline_));
}

c10::intrusive_ptr<BoundedStore> BoundedStore::by(const Deadline& deadline) const {
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
    host_->leave_behind(pending, since);
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
      [&] { return session->next_look(); }, [&] { return session->unanswered(); });
}

template <typename Operation>
auto BoundedStore::ask(const char* name, Milliseconds patience, Operation operation) {
  if (deadline_) patience = std::min(patience, deadline_->left());
  const auto start = Deadline::Clock::now();
  const auto due = Deadline::in(patience) + kAnswerGrace;
  if (session_ && session_->begin(name, due)) {
    const auto end = c10::make_scope_exit([&] { session_->end(); });
    return operation(*store_);
  }
  return call_in_time(
      name, [store = store_, operation = std::move(operation)] { return operation(*store); }, due,
      [&] { return std::make_pair(name, start); });
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
