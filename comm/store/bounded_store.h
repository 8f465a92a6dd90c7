#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ddp/internal/check.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/deadline.h"
#include "base/executor.h"

namespace ddp {

/// The process that hosts a store did not answer in time: it is stopped, swapping, or cut off.
class SilentStoreError : public c10::DistStoreError {
 public:
  using c10::DistStoreError::DistStoreError;
};

/// A store whose operations end in bounded time, whatever happens to the process that hosts it.
///
/// c10d's TCPStore receives without a limit: if the hosting process is frozen, every operation
/// blocks for ever. Here the store's thread runs an operation, while the caller waits. The limit of
/// an operation is the store's timeout (for `wait`: its argument), or the time left until a
/// deadline, plus one second for the answer. An operation without an answer throws
/// SilentStoreError, and its thread is abandoned. While it has none, later operations throw at
/// once, because a TCPStore serves one at a time. The store works again once the answer has
/// arrived.
///
/// Threads: as safe as the wrapped store. Operations at the same time have a thread each.
/// Cost: two switches of threads per operation, a few us.
class BoundedStore : public c10d::Store {
 public:
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using Bytes = std::vector<uint8_t>;
  using Keys = std::vector<std::string>;
  using Milliseconds = std::chrono::milliseconds;

  /// \param host  who hosts the store, for messages: "which rank 0 hosts".
  BoundedStore(StorePtr store, const std::string& host);

  /// The same store, with `prefix` before all keys.
  c10::intrusive_ptr<BoundedStore> with_prefix(const std::string& prefix) const;

  /// The same store, whose operations end at the deadline (plus one second), if not earlier. After
  /// the deadline, an operation still has that second.
  c10::intrusive_ptr<BoundedStore> with_deadline(const Deadline& deadline) const;

  /// The wrapped store, whose operations may block for ever: for a thread that may be abandoned.
  const StorePtr& unbounded() const { return store_; }

  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const Bytes& value) override;
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override;
  Bytes get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const Keys& keys) override;
  int64_t getNumKeys() override;
  void wait(const Keys& keys) override;
  void wait(const Keys& keys, const Milliseconds& timeout) override;
  const Milliseconds& getTimeout() const noexcept override;
  void setTimeout(const Milliseconds& timeout) override;
  void append(const std::string& key, const Bytes& value) override;
  std::vector<Bytes> multiGet(const Keys& keys) override;
  void multiSet(const Keys& keys, const std::vector<Bytes>& values) override;
  bool hasExtendedApi() const override;
  void queuePush(const std::string& key, const Bytes& value) override;
  Bytes queuePop(const std::string& key, bool block) override;
  int64_t queueLen(const std::string& key) override;
  std::vector<std::string> listKeys() override;

  friend c10::intrusive_ptr<BoundedStore> bounded(const StorePtr& store);

 private:
  class HostState;

  BoundedStore(StorePtr store, std::shared_ptr<HostState> host, std::optional<Deadline> deadline);

  [[noreturn]] void throw_silent(const char* name, Deadline::Clock::time_point since) const;

  /// Runs `operation`, which returns a value, on the store.
  template <typename Operation>
  auto run_operation(const char* name, Milliseconds patience, Operation operation);
  template <typename Operation>
  auto run_operation(const char* name, Operation operation);
  /// The same, for an operation without a result.
  template <typename Operation>
  void run_without_result(const char* name, Operation operation);

  const StorePtr store_;
  const std::shared_ptr<HostState> host_;  // shared by all views of one store
  const std::optional<Deadline> deadline_;
};

/// Wraps the store, unless it is a BoundedStore already. A prefix around a BoundedStore keeps the
/// host's name.
c10::intrusive_ptr<BoundedStore> bounded(const c10::intrusive_ptr<c10d::Store>& store);

/// The same store over another connection; the store itself if it cannot be cloned.
c10::intrusive_ptr<c10d::Store> clone_of(const c10::intrusive_ptr<c10d::Store>& store);

/// Calls a store on a thread of its own, in order, so that no other thread blocks in the store.
///
/// A TCPStore's calls end in a `recv` without a limit: if the process that hosts the store is
/// stopped, or its host is gone, they do not return. A thread that gets no answer from the store is
/// abandoned.
///
/// Thread safety: all members.
class StoreExecutor {
 public:
  using Job = std::function<void(c10d::Store&)>;

  /// \param store  with a connection of its own: calls of one connection wait for each other, and a
  ///         user's call may take long. Opened before it is needed: TCPStore tries to reach a host
  ///         that is gone until its timeout.
  explicit StoreExecutor(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
  /// Waits up to half a second for the posted jobs.
  ~StoreExecutor() { executor_.close(std::chrono::milliseconds(500)); }

  /// Queues `job`. Its exceptions are dropped. `job` must own what it uses: it may run after the
  /// executor is destroyed.
  void post(Job job) {
    executor_.push(
        [job = std::move(job), store = store_] { (void)problem_of([&] { job(*store); }); });
  }

  /// Runs `query` and waits for its answer.
  ///
  /// \return nothing if the store has not answered within `at_most`.
  /// \throws the exception of `query`.
  template <typename Answer>
  std::optional<Answer> ask(
      std::function<Answer(c10d::Store&)> query, std::chrono::milliseconds at_most) {
    return executor_.ask(
        [query = std::move(query), store = store_] { return query(*store); },
        Deadline::in(at_most));
  }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  Executor executor_;
};

}  // namespace ddp
