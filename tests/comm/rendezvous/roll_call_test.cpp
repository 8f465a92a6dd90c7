#include "comm/store/startup_barrier.h"
#include "support/error_of.h"

#include <future>
#include <thread>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "support/catch.h"

using ddp::Deadline;
using ddp::run_startup_barrier;
using ddp::StartupBarrier;
using namespace std::chrono_literals;

namespace {

struct Outcome {
  std::string name;   // of the round
  std::string error;  // the thrown text, or ""
  std::chrono::milliseconds took{0};
};

using Store = c10::intrusive_ptr<c10d::Store>;

Outcome enter(
    const Store& store, int rank, int world_size, std::chrono::milliseconds timeout,
    const std::string& claim = "", const std::string& problem = "") {
  Outcome outcome;
  const auto start = std::chrono::steady_clock::now();
  outcome.error = ddp::testing::error_of<c10::Error>([&] {
    outcome.name =
        run_startup_barrier({store, rank, world_size, Deadline(timeout), "test"}, claim, problem);
  });
  outcome.took = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - start);
  return outcome;
}

/// Lets those ranks of a world enter the barrier, each on a thread.
std::vector<Outcome> enter_all(
    const Store& store, const std::vector<int>& ranks, int world_size,
    std::chrono::milliseconds timeout) {
  std::vector<std::future<Outcome>> futures;
  for (const int rank : ranks) {
    futures.push_back(
        std::async(std::launch::async, [=] { return enter(store, rank, world_size, timeout); }));
  }
  std::vector<Outcome> outcomes;
  for (auto& future : futures) outcomes.push_back(future.get());
  return outcomes;
}

}  // namespace

TEST_CASE("each barrier gives all ranks the same fresh name", "[comm][ranks][once]") {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  std::string last;
  for (int round = 0; round < 5; ++round) {
    const auto outcomes = enter_all(store, {0, 1, 2}, 3, 10s);
    for (const auto& outcome : outcomes) {
      CHECK(outcome.error.empty());
      CHECK(outcome.name == outcomes[0].name);
    }
    CHECK_FALSE(outcomes[0].name.empty());
    CHECK(outcomes[0].name != last);
    last = outcomes[0].name;
  }
}

TEST_CASE("a barrier can follow another one that slow ranks have not left", "[comm][ranks][once]") {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::future<std::vector<std::string>>> futures;
  for (int rank = 0; rank < 3; ++rank) {
    futures.push_back(std::async(std::launch::async, [=] {
      std::vector<std::string> names;
      for (int round = 0; round < 50; ++round) {
        const auto outcome = enter(store, rank, 3, 10s);
        names.push_back(outcome.name + outcome.error);
      }
      return names;
    }));
  }
  const auto names = futures[0].get();
  CHECK(futures[1].get() == names);
  CHECK(futures[2].get() == names);
}

TEST_CASE("every rank that arrived names the missing ones in time", "[comm][ranks][errors][once]") {
  const auto [present, missing] = GENERATE(table<std::vector<int>, std::string>({
      {{0, 1}, "but ranks 2, 3 did not come"},
      {{0}, "but ranks 1, 2, 3 did not come"},
      {{1, 2}, "but ranks 0, 3 did not come"},
      {{0, 2, 3}, "but rank 1 did not come"},
      {{1, 2, 3}, "but rank 0 did not come"},
  }));
  const auto outcomes = enter_all(c10::make_intrusive<c10d::HashStore>(), present, 4, 3s);
  for (const auto& outcome : outcomes) {
    CHECK_THAT(
        outcome.error,
        ContainsText("test: expected all 4 ranks within 3000 ms") && ContainsText(missing));
    CHECK(outcome.took >= 2900ms);
    CHECK(outcome.took < 5900ms);  // not two timeouts
  }
}

TEST_CASE("a barrier can be repeated after one that failed", "[comm][ranks][once]") {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  for (const auto& outcome : enter_all(store, {1}, 2, 100ms)) CHECK_FALSE(outcome.error.empty());
  for (const auto& outcome : enter_all(store, {0, 1}, 2, 10s)) CHECK(outcome.error.empty());
}

TEST_CASE(
    "ranks that died in an open round do not count as their successors", "[comm][ranks][once]") {
  // The keys that a killed process leaves: rank 1 of 3 has arrived, and will not confirm.
  const Store store = c10::make_intrusive<c10d::HashStore>();
  store->set("open", std::string("stale"));
  store->set("stale/who/1", std::string("dead"));
  store->compareSet("stale/claim", std::string(), "1 ");
  store->set("stale/here/1", std::string("1"));
  store->add("stale/count", 1);

  // Two successors fill the round; the third one, which finds its number taken, arrives last.
  auto early = std::async(std::launch::async, [&] { return enter_all(store, {0, 2}, 3, 10s); });
  while (!store->check({"stale/full"})) std::this_thread::yield();
  const auto late = enter(store, 1, 3, 10s);
  CHECK(late.error.empty());
  CHECK(late.name != "stale");
  for (const auto& outcome : early.get()) {
    CHECK(outcome.error.empty());
    CHECK(outcome.name == late.name);
  }
}

TEST_CASE("the claim of ranks that died does not fail the live ranks", "[comm][ranks][once]") {
  // The dead ranks were a world of another size, and rank 1 had not arrived.
  const Store store = c10::make_intrusive<c10d::HashStore>();
  store->set("open", std::string("stale"));
  store->set("stale/who/0", std::string("dead"));
  store->compareSet("stale/claim", std::string(), "0 world size 3");
  store->add("stale/count", 1);

  auto other = std::async(std::launch::async, [&] { return enter(store, 1, 2, 10s, "size 2"); });
  const auto mine = enter(store, 0, 2, 10s, "size 2");
  CHECK(mine.error.empty());
  CHECK(other.get().error.empty());
}

TEST_CASE("two processes with one rank both throw soon", "[comm][ranks][errors][once]") {
  // No process waits for the timeout, whether the other ranks have arrived or not.
  const auto ranks =
      GENERATE(std::vector<int>{1, 1}, std::vector<int>{1, 1, 0}, std::vector<int>{0, 0, 0});
  const auto outcomes = enter_all(c10::make_intrusive<c10d::HashStore>(), ranks, 3, 20s);
  const auto expected = "two processes claim rank " + std::to_string(ranks[0]) + ".";
  int how_many = 0;
  for (const auto& outcome : outcomes) {
    UNSCOPED_INFO(outcome.error << " after " << outcome.took.count());
    if (outcome.error.find(expected) == std::string::npos) continue;
    ++how_many;
    CHECK_THAT(
        outcome.error, ContainsText("test: expected one process for each of the 3 ranks, but ") &&
                           ContainsText("RANK"));
    CHECK(outcome.took < 10s);
  }
  CHECK(how_many >= 2);
}

TEST_CASE("a process whose rank was taken in a later round throws", "[comm][ranks][errors][once]") {
  // The first process has entered a round when a second one with its rank opens the next round,
  // which succeeds before the first process checks.
  const Store store = c10::make_intrusive<c10d::HashStore>();
  auto first = std::async(std::launch::async, [&] { return enter(store, 1, 2, 20s); });
  while (!store->check({"open"})) std::this_thread::yield();
  const auto name = store->get_to_str("open");
  while (!store->check({name + "/here/1"})) std::this_thread::yield();
  store->set("next/who/1", std::string("second"));
  store->set("next/verdict", std::string("ok"));
  store->set("open", std::string("next"));
  const auto outcome = first.get();
  CHECK_THAT(outcome.error, ContainsText("two processes claim rank 1"));
  CHECK(outcome.took < 10s);
}

TEST_CASE(
    "rank 0 waits until the others have read the verdict, for a limited time",
    "[comm][ranks][once]") {
  const bool reads = GENERATE(true, false);
  const Store store = c10::make_intrusive<c10d::HashStore>();
  auto first = std::async(std::launch::async, [&] { return enter(store, 0, 3, 4s); });
  // The test plays rank 1, so that it can be slow.
  while (!store->check({"open"})) std::this_thread::yield();
  const auto name = store->get_to_str("open");
  store->set(name + "/here/1", std::string("1"));
  store->add(name + "/count", 1);
  while (!store->check({name + "/verdict"})) std::this_thread::yield();
  CHECK(first.wait_for(300ms) == std::future_status::timeout);
  if (reads) {
    store->add(name + "/read", 1);
    CHECK(first.wait_for(10s) == std::future_status::ready);
  }
  const auto outcome = first.get();
  CHECK_THAT(outcome.error, ContainsText("but rank 2 did not come"));
  CHECK(outcome.took < 15s);
}

TEST_CASE(
    "a rank gets the verdict of its round although the next one is already open", "[comm][once]") {
  // In this store the other ranks end the round and open the next one at the moment when a rank
  // checks for a newer round.
  struct Interleaved : c10d::HashStore {
    std::vector<uint8_t> get(const std::string& key) override {
      if (key == "open" && !std::exchange(done, true)) {
        const auto name = compareSet("open", {}, {});
        const std::string verdict = std::string(name.begin(), name.end()) + "/verdict";
        set(verdict, {'o', 'k'});
        set("open", {'n', 'e', 'x', 't'});
      }
      return HashStore::get(key);
    }
    bool done = false;
  };
  const auto outcome = enter(c10::make_intrusive<Interleaved>(), 1, 2, 1s);
  CHECK(outcome.error.empty());
  CHECK(outcome.name != "next");
}

TEST_CASE("ranks that do not agree all throw both claims", "[comm][ranks][errors][once]") {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  auto other = std::async(std::launch::async, [&] { return enter(store, 0, 2, 10s, "apples"); });
  const auto mine = enter(store, 1, 2, 10s, "pears");
  const auto theirs = other.get();
  CHECK(mine.error == theirs.error);
  CHECK_THAT(
      mine.error, ContainsText("test: expected all ranks to call it alike") &&
                      ContainsText("apples") && ContainsText("pears"));
  CHECK(mine.took < 5s);
}

TEST_CASE(
    "the rank that opens a round need not be the first to claim in it",
    "[comm][ranks][errors][once]") {
  // In this store another rank's claim is set as soon as the first round is open.
  struct Overtaking : c10d::HashStore {
    using Bytes = std::vector<uint8_t>;
    Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
      const auto value = HashStore::compareSet(key, expected, desired);
      if (key != "open") return value;
      TORCH_CHECK(++rounds_ < 100, "opens one round after the other");
      if (rounds_ == 1) {
        const std::string claim = "0 apples";
        const auto name = std::string(value.begin(), value.end());
        HashStore::compareSet(name + "/claim", {}, Bytes(claim.begin(), claim.end()));
      }
      return value;
    }
    int rounds_ = 0;
  };
  const Store store = c10::make_intrusive<Overtaking>();
  auto mine = std::async(std::launch::async, [&] { return enter(store, 1, 2, 8s, "pears"); });
  while (!store->check({"open"})) std::this_thread::yield();
  const auto theirs = enter(store, 0, 2, 8s, "apples");
  CHECK_THAT(theirs.error, ContainsText("apples") && ContainsText("pears"));
  CHECK(mine.get().error == theirs.error);
}

TEST_CASE(
    "all ranks throw the problem of one, once all have arrived", "[comm][ranks][errors][once]") {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  auto first =
      std::async(std::launch::async, [&] { return enter(store, 1, 2, 10s, "", "no GPU"); });
  while (!store->check({"open"})) std::this_thread::yield();
  const auto second = enter(store, 0, 2, 10s);
  CHECK(second.error == "test on rank 1 of 2: no GPU");
  CHECK(first.get().error == second.error);
}

TEST_CASE(
    "the problem of one rank is thrown even if another never arrives",
    "[comm][ranks][errors][once]") {
  const auto outcome = enter(c10::make_intrusive<c10d::HashStore>(), 1, 2, 200ms, "", "no GPU.");
  CHECK_THAT(
      outcome.error,
      ContainsText("test on rank 1 of 2: no GPU. Also, test: expected all 2 ranks") &&
          ContainsText("but rank 0 did not come"));
}

TEST_CASE("a barrier of one rank does not wait", "[comm][once]") {
  CHECK(enter(nullptr, 0, 1, 1ms).error.empty());
}
