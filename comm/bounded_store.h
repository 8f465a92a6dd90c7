#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "deadline.h"

namespace ddp {

/// The process that hosts a store did not answer in time: stopped, swapping, or cut off.
class SilentStoreError : public c10::DistStoreError {
 public:
  using c10::DistStoreError::DistStoreError;
};

/// A store whose operations end in bounded time, whatever happens to the process that hosts it.
///
/// c10d's TCPStore receives without a limit: with the hosting process frozen, every operation lasts
/// for ever. Here each operation runs as a `bounded_call`, or many in one, by `run`. An operation
/// has the store's timeout (`wait`: the one it is given), or what is left until a deadline, plus
/// one second for the answer. An operation without an answer throws SilentStoreError. As long as it
/// has none, later operations throw at once, because a TCPStore serves one at a time. The store
/// works again once the answer has come.
///
/// Threads: as safe as the store below.
/// Cost: one thread start an operation, about 60 us; in `run` one in all.
class BoundedStore : public c10d::Store {
 public:
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using Bytes = std::vector<uint8_t>;
  using Keys = std::vector<std::string>;
  using Milliseconds = std::chrono::milliseconds;

  /// \param host  who hosts the store, for the message: "which rank 0 hosts".
  BoundedStore(StorePtr store, const std::string& host);

  /// The same store, with all keys below `prefix`.
  c10::intrusive_ptr<BoundedStore> within(const std::string& prefix) const;

  /// The same store, whose operations end at the deadline (plus one second), if not earlier. Past
  /// it, an operation still has that second.
  c10::intrusive_ptr<BoundedStore> by(const Deadline& deadline) const;

  /// The store itself, whose operations may last for ever: for a thread that may be left behind.
  const StorePtr& unbounded() const { return store_; }

  /// Runs `work`, with the same store, on a thread of its own, and waits for it. The thread makes
  /// the store's operations itself; when one gets no answer, the work is left behind, and its next
  /// operation throws. The store may be kept: after `run` each operation has a thread again.
  ///
  /// \param work  owns all that it uses, as in `bounded_call`.
  /// \throws  what `work` throws. SilentStoreError when it was left behind.
  void run(std::function<void(const StorePtr& store)> work) const;

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
  class Host;
  class Session;

  BoundedStore(
      StorePtr store, std::shared_ptr<Host> host, std::optional<Deadline> deadline,
      std::shared_ptr<Session> session = nullptr);

  [[noreturn]] void throw_silent(const char* name, Deadline::Clock::time_point since) const;

  /// The operation that had no answer, and since when.
  using Unanswered = std::function<std::pair<const char*, Deadline::Clock::time_point>()>;
  /// `bounded_call`, which remembers what was left behind.
  template <typename Call, typename Until>
  auto call_in_time(
      const char* name, Call call, const Until& until, const Unanswered& unanswered) const;

  /// Runs `operation`, which returns a value, on the store.
  template <typename Operation>
  auto ask(const char* name, Milliseconds patience, Operation operation);
  template <typename Operation>
  auto ask(const char* name, Operation operation);
  /// The same, for one without a result.
  template <typename Operation>
  void tell(const char* name, Operation operation);

  const StorePtr store_;
  const std::shared_ptr<Host> host_;  // what all views of one store share
  const std::optional<Deadline> deadline_;
  const std::shared_ptr<Session> session_;  // of the `run` that made this view, if one did
};

/// The store as a bounded one: itself, where it is one. A prefix around a bounded store keeps the
/// name of the host.
c10::intrusive_ptr<BoundedStore> bounded(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace ddp
