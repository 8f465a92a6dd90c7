// A store like a user's own class: it only implements the pure virtual functions of c10d::Store.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace ddp::testing {

/// A store without compareSet, append and operations for many keys.
class PlainStore : public c10d::Store {
 public:
  using Bytes = std::vector<uint8_t>;
  using Keys = std::vector<std::string>;

  PlainStore() : PlainStore(c10::make_intrusive<c10d::HashStore>()) {}
  explicit PlainStore(c10::intrusive_ptr<c10d::Store> store)
      : Store(store->getTimeout()), store_(std::move(store)) {}

  using Store::set;

  c10::intrusive_ptr<Store> clone() override { return c10::make_intrusive<PlainStore>(store_); }
  void set(const std::string& key, const Bytes& value) override { store_->set(key, value); }
  Bytes get(const std::string& key) override { return store_->get(key); }
  int64_t add(const std::string& key, int64_t value) override { return store_->add(key, value); }
  bool deleteKey(const std::string& key) override { return store_->deleteKey(key); }
  bool check(const Keys& keys) override { return store_->check(keys); }
  int64_t getNumKeys() override { return store_->getNumKeys(); }
  void wait(const Keys& keys) override { store_->wait(keys); }
  void wait(const Keys& keys, const std::chrono::milliseconds& timeout) override {
    store_->wait(keys, timeout);
  }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace ddp::testing
