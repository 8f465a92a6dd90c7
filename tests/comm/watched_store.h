// A store between the library and another one, to count or block operations.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ddp::testing {

/// Calls `on_call` with an operation's name, and then the wrapped store.
class WatchedStore : public c10d::Store {
 public:
  using OnCall = std::function<void(const std::string& operation)>;

  WatchedStore(c10::intrusive_ptr<c10d::Store> store, OnCall on_call)
      : Store(store->getTimeout()), store_(std::move(store)), on_call_(std::move(on_call)) {}

  using Store::compareSet;
  using Store::set;

  /// Not counted, because a TCPStore's clone() opens a connection without a request.
  c10::intrusive_ptr<Store> clone() override {
    return c10::make_intrusive<WatchedStore>(store_->clone(), on_call_);
  }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    on_call_("set");
    store_->set(key, value);
  }
  std::vector<uint8_t> compareSet(
      const std::string& key, const std::vector<uint8_t>& current,
      const std::vector<uint8_t>& value) override {
    on_call_("compareSet");
    return store_->compareSet(key, current, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    on_call_("get");
    return store_->get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    on_call_("add");
    return store_->add(key, value);
  }
  bool deleteKey(const std::string& key) override {
    on_call_("deleteKey");
    return store_->deleteKey(key);
  }
  bool check(const std::vector<std::string>& keys) override {
    on_call_("check");
    return store_->check(keys);
  }
  int64_t getNumKeys() override {
    on_call_("getNumKeys");
    return store_->getNumKeys();
  }
  void wait(const std::vector<std::string>& keys) override {
    on_call_("wait");
    store_->wait(keys);
  }
  void wait(
      const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    on_call_("wait");
    store_->wait(keys, timeout);
  }
  const std::chrono::milliseconds& getTimeout() const noexcept override {
    return store_->getTimeout();
  }
  void setTimeout(const std::chrono::milliseconds& timeout) override {
    store_->setTimeout(timeout);
  }
  void append(const std::string& key, const std::vector<uint8_t>& value) override {
    on_call_("append");
    store_->append(key, value);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    on_call_("multiGet");
    return store_->multiGet(keys);
  }
  void multiSet(
      const std::vector<std::string>& keys,
      const std::vector<std::vector<uint8_t>>& values) override {
    on_call_("multiSet");
    store_->multiSet(keys, values);
  }
  bool hasExtendedApi() const override { return store_->hasExtendedApi(); }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const OnCall on_call_;
};

}  // namespace ddp::testing
