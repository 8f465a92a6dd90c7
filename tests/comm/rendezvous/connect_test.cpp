// Failures and delays after all ranks have arrived, while the backends connect.
#include <ddp/process_group.h>

#include <future>
#include <thread>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <ddp/collectives.h>

#include "support/error_of.h"

#include "support/catch.h"

using ddp::ProcessGroup;
using ddp::ProcessGroupOptions;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

namespace {

/// A rank's view of the store that calls `hook` before Gloo's keys are written or read.
class HookedStore : public c10d::PrefixStore {
 public:
  HookedStore(const StorePtr& store, std::function<void()> hook)
      : PrefixStore("hooked", store), hook_(std::move(hook)) {}

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    call_hook(key);
    PrefixStore::set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    call_hook(key);
    return PrefixStore::get(key);
  }
  void wait(
      const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    call_hook(keys.front());
    PrefixStore::wait(keys, timeout);
  }

 private:
  void call_hook(const std::string& key) const {
    if (key.find("/gloo/") != std::string::npos) hook_();
  }

  std::function<void()> hook_;
};

struct Connection {
  ProcessGroup group;
  std::string error;
  Clock::duration took{};
};

std::future<Connection> make(
    const StorePtr& store, int rank, std::chrono::milliseconds timeout,
    const std::function<void()>& hook = [] {}) {
  const StorePtr hooked = c10::make_intrusive<HookedStore>(store, hook);
  const auto options =
      ProcessGroupOptions().backend("gloo").store(hooked).rank(rank).world_size(2).timeout(timeout);
  return std::async(std::launch::async, [options] {
    Connection outcome;
    const auto start = Clock::now();
    outcome.error = ddp::testing::error_of<c10::Error>(
        [&] { outcome.group = ddp::make_process_group(options); });
    outcome.took = Clock::now() - start;
    return outcome;
  });
}

}  // namespace

TEST_CASE("no rank has a group before all are connected", "[comm][ranks][once]") {
  // Otherwise rank 0 could exit, with the store, while another rank still reads addresses there.
  const int slow = GENERATE(0, 1);
  CAPTURE(slow);
  std::promise<void> release;
  const auto released = release.get_future().share();
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  bool is_first = true;
  auto held = make(store, slow, 20s, [&] {
    // The first call writes its own address; later calls read the others' addresses.
    if (!std::exchange(is_first, false)) released.wait();
  });
  auto other = make(store, 1 - slow, 20s);
  CHECK(other.wait_for(500ms) == std::future_status::timeout);
  release.set_value();
  CHECK(held.get().error.empty());
  CHECK(other.get().error.empty());
}

TEST_CASE(
    "an error while one rank connects is thrown on all ranks, within one timeout in all",
    "[comm][ranks][errors][once]") {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  auto first = make(store, 0, 6s);
  std::this_thread::sleep_for(2s);
  auto second = make(store, 1, 6s, [] { throw std::runtime_error("no way"); });
  const auto outcome = first.get();
  CHECK_THAT(
      outcome.error,
      ContainsText("init_process_group on rank 1 of 2: Gloo: expected rank 1 of 2 to connect") &&
          ContainsText("no way") && ContainsText("GLOO_SOCKET_IFNAME"));
  CHECK(outcome.error == second.get().error);
  CHECK(outcome.took < 7500ms);  // 8 s with a timeout for each
}

TEST_CASE(
    "the time to make a group does not shorten the timeout of its calls", "[comm][ranks][once]") {
  const bool point_to_point = GENERATE(true, false);
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  auto first = make(store, 0, 4s);
  std::this_thread::sleep_for(1s);
  const auto second = make(store, 1, 4s).get();
  const auto made = first.get();
  INFO(made.error << " / " << second.error);
  const auto group = made.group;
  REQUIRE(group);
  REQUIRE(second.group);
  auto tensor = at::zeros({1});
  const auto start = Clock::now();
  if (point_to_point) {
    CHECK_THROWS(ddp::recv(tensor, 1, 0, group));
  } else {
    CHECK_THROWS(ddp::all_reduce(tensor, c10d::ReduceOp::SUM, group));
  }
  CHECK(Clock::now() - start >= 3900ms);
}
