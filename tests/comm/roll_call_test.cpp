#include "comm/roll_call.h"

#include <future>
#include <thread>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "support/catch.h"

using ddp::call_roll;
using ddp::Deadline;
using ddp::RollCall;
using namespace std::chrono_literals;

namespace {

struct Outcome {
  std::string name;   // of the roll
  std::string error;  // or what was thrown
  std::chrono::milliseconds took{0};
};

using Store = c10::intrusive_ptr<c10d::Store>;

Outcome attend(
    const Store& store, int rank, int world_size, std::chrono::milliseconds timeout,
    const std::string& claim = "", const std::string& problem = "") {
  Outcome outcome;
  const auto start = std::chrono::steady_clock::now();
  try {
    outcome.name = call_roll({store, rank, world_size, Deadline(timeout), "test"}, claim, problem);
  } catch (const c10::Error& error) {
    outcome.error = error.what_without_backtrace();
  }
  outcome.took = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - start);
  return outcome;
}

/// Those ranks of a world, each on a thread.
std::vector<Outcome> attend_all(
    const Store& store, const std::vector<int>& ranks, int world_size,
    std::chrono::milliseconds timeout) {
  std::vector<std::future<Outcome>> futures;
  for (const int rank : ranks) {
    futures.push_back(
        std::async(std::launch::async, [=] { return attend(store, rank, world_size, timeout); }));
  }
  std::vector<Outcome> outcomes;
  for (auto& future : futures) outcomes.push_back(future.get());
  return outcomes;
}

}  // namespace

TEST_CASE(
    "a full roll call gives all ranks the same fresh name, again and again", "[comm][ranks]") {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  std::string last;
  for (int round = 0; round < 5; ++round) {
    const auto outcomes = attend_all(store, {0, 1, 2}, 3, 10s);
    for (const auto& outcome : outcomes) {
      CHECK(outcome.error.empty());
      CHECK(outcome.name == outcomes[0].name);
    }
    CHECK_FALSE(outcomes[0].name.empty());
    CHECK(outcomes[0].name != last);
    last = outcomes[0].name;
  }
}

TEST_CASE("rounds follow each other without waiting for the slow", "[comm][ranks]") {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::future<std::vector<std::string>>> futures;
  for (int rank = 0; rank < 3; ++rank) {
    futures.push_back(std::async(std::launch::async, [=] {
      std::vector<std::string> names;
      for (int round = 0; round < 50; ++round) {
        const auto outcome = attend(store, rank, 3, 10s);
        names.push_back(outcome.name + outcome.error);
      }
      return names;
    }));
  }
  const auto names = futures[0].get();
  CHECK(futures[1].get() == names);
  CHECK(futures[2].get() == names);
}

TEST_CASE("every rank that came names those that did not, in time", "[comm][ranks][errors]") {
  const auto [present, missing] = GENERATE(table<std::vector<int>, std::string>({
      {{0, 1}, "but ranks 2, 3 did not come"},
      {{0}, "but ranks 1, 2, 3 did not come"},
      {{1, 2}, "but ranks 0, 3 did not come"},
      {{0, 2, 3}, "but rank 1 did not come"},
      {{1, 2, 3}, "but rank 0 did not come"},
  }));
  const auto outcomes = attend_all(c10::make_intrusive<c10d::HashStore>(), present, 4, 300ms);
  for (const auto& outcome : outcomes) {
    CHECK_THAT(
        outcome.error,
        ContainsText("test: expected all 4 ranks within 300 ms") && ContainsText(missing));
    CHECK(outcome.took >= 250ms);
    CHECK(outcome.took < 1300ms);
  }
}

TEST_CASE("a roll call can be repeated after one that failed", "[comm][ranks]") {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  for (const auto& outcome : attend_all(store, {1}, 2, 100ms)) CHECK_FALSE(outcome.error.empty());
  for (const auto& outcome : attend_all(store, {0, 1}, 2, 10s)) CHECK(outcome.error.empty());
}

TEST_CASE("ranks that died in an open roll are not taken for their successors", "[comm][ranks]") {
  // What a killed process leaves behind: rank 1 of 3 has come, and will never go on.
  const Store store = c10::make_intrusive<c10d::HashStore>();
  store->set("open", std::string("stale"));
  store->set("stale/who/1", std::string("dead"));
  store->compareSet("stale/claim", std::string(), "1 ");
  store->set("stale/here/1", std::string("1"));
  store->add("stale/count", 1);

  // Two successors fill the roll; the third one, who knows better, comes last.
  auto early = std::async(std::launch::async, [&] { return attend_all(store, {0, 2}, 3, 10s); });
  while (!store->check({"stale/full"})) std::this_thread::yield();
  const auto late = attend(store, 1, 3, 10s);
  CHECK(late.error.empty());
  CHECK(late.name != "stale");
  for (const auto& outcome : early.get()) {
    CHECK(outcome.error.empty());
    CHECK(outcome.name == late.name);
  }
}

TEST_CASE("what ranks that died have claimed is not held against the living", "[comm][ranks]") {
  // They were a world of another size, and rank 1 had not come yet.
  const Store store = c10::make_intrusive<c10d::HashStore>();
  store->set("open", std::string("stale"));
  store->set("stale/who/0", std::string("dead"));
  store->compareSet("stale/claim", std::string(), "0 world size 3");
  store->add("stale/count", 1);

  auto other = std::async(std::launch::async, [&] { return attend(store, 1, 2, 10s, "size 2"); });
  const auto mine = attend(store, 0, 2, 10s, "size 2");
  CHECK(mine.error.empty());
  CHECK(other.get().error.empty());
}

TEST_CASE("two processes with one rank are told so, and soon", "[comm][ranks][errors]") {
  // With the others there or not: nobody has to wait for the timeout.
  const auto ranks =
      GENERATE(std::vector<int>{1, 1}, std::vector<int>{1, 1, 0}, std::vector<int>{0, 0, 0});
  const auto outcomes = attend_all(c10::make_intrusive<c10d::HashStore>(), ranks, 3, 3s);
  const auto told = "two processes claim rank " + std::to_string(ranks[0]) + ".";
  int how_many = 0;
  for (const auto& outcome : outcomes) {
    if (outcome.error.find(told) == std::string::npos) continue;
    ++how_many;
    CHECK_THAT(
        outcome.error, ContainsText("test: expected one process for each of the 3 ranks, but ") &&
                           ContainsText("RANK"));
    CHECK(outcome.took < 2s);
  }
  CHECK(how_many >= 2);
}

TEST_CASE("a process that comes too late for its rank is told so", "[comm][ranks][errors]") {
  // A first one has taken part when a second one with its rank opens the next roll, and that one
  // goes well before the first one looks.
  const Store store = c10::make_intrusive<c10d::HashStore>();
  auto first = std::async(std::launch::async, [&] { return attend(store, 1, 2, 8s); });
  while (!store->check({"open"})) std::this_thread::yield();
  const auto name = store->get_to_str("open");
  while (!store->check({name + "/here/1"})) std::this_thread::yield();
  store->set("next/who/1", std::string("second"));
  store->set("next/verdict", std::string("ok"));
  store->set("open", std::string("next"));
  const auto outcome = first.get();
  CHECK_THAT(outcome.error, ContainsText("two processes claim rank 1"));
  CHECK(outcome.took < 3s);
}

TEST_CASE("rank 0 stays until the others have read the verdict, within bounds", "[comm][ranks]") {
  const bool reads = GENERATE(true, false);
  const Store store = c10::make_intrusive<c10d::HashStore>();
  auto first = std::async(std::launch::async, [&] { return attend(store, 0, 3, 100ms); });
  // Rank 1 by hand, so that it can be slow.
  while (!store->check({"open"})) std::this_thread::yield();
  const auto name = store->get_to_str("open");
  store->set(name + "/here/1", std::string("1"));
  store->add(name + "/count", 1);
  while (!store->check({name + "/verdict"})) std::this_thread::yield();
  CHECK(first.wait_for(300ms) == std::future_status::timeout);
  if (reads) {
    store->add(name + "/read", 1);
    CHECK(first.wait_for(1s) == std::future_status::ready);
  }
  const auto outcome = first.get();
  CHECK_THAT(outcome.error, ContainsText("but rank 2 did not come"));
  CHECK(outcome.took < 3s);
}

TEST_CASE("a roll that is over is over, also when the next one is open already", "[comm]") {
  // A store on which, in the moment when a rank looks for a newer roll, the others end this one
  // and open the next.
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
  const auto outcome = attend(c10::make_intrusive<Interleaved>(), 1, 2, 1s);
  CHECK(outcome.error.empty());
  CHECK(outcome.name != "next");
}

TEST_CASE("ranks that do not agree all learn what each of them says", "[comm][ranks][errors]") {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  auto other = std::async(std::launch::async, [&] { return attend(store, 0, 2, 10s, "apples"); });
  const auto mine = attend(store, 1, 2, 10s, "pears");
  const auto theirs = other.get();
  CHECK(mine.error == theirs.error);
  CHECK_THAT(
      mine.error, ContainsText("test: expected all ranks to call it alike") &&
                      ContainsText("apples") && ContainsText("pears"));
  CHECK(mine.took < 5s);
}

TEST_CASE("whoever opens a roll may be overtaken in it", "[comm][ranks][errors]") {
  // A store on which another rank's claim is there as soon as the first roll is open.
  struct Overtaking : c10d::HashStore {
    using Bytes = std::vector<uint8_t>;
    Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
      const auto value = HashStore::compareSet(key, expected, desired);
      if (key != "open") return value;
      TORCH_CHECK(++rolls_ < 100, "opens one roll after the other");
      if (rolls_ == 1) {
        const std::string claim = "0 apples";
        const auto name = std::string(value.begin(), value.end());
        HashStore::compareSet(name + "/claim", {}, Bytes(claim.begin(), claim.end()));
      }
      return value;
    }
    int rolls_ = 0;
  };
  const Store store = c10::make_intrusive<Overtaking>();
  auto mine = std::async(std::launch::async, [&] { return attend(store, 1, 2, 8s, "pears"); });
  while (!store->check({"open"})) std::this_thread::yield();
  const auto theirs = attend(store, 0, 2, 8s, "apples");
  CHECK_THAT(theirs.error, ContainsText("apples") && ContainsText("pears"));
  CHECK(mine.get().error == theirs.error);
}

TEST_CASE(
    "the problem of one rank ends the roll for all, once all are here", "[comm][ranks][errors]") {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  auto first =
      std::async(std::launch::async, [&] { return attend(store, 1, 2, 10s, "", "no GPU"); });
  while (!store->check({"open"})) std::this_thread::yield();
  const auto second = attend(store, 0, 2, 10s);
  CHECK(second.error == "test on rank 1 of 2: no GPU");
  CHECK(first.get().error == second.error);
}

TEST_CASE(
    "the problem of one rank is told even when another never comes", "[comm][ranks][errors]") {
  const auto outcome = attend(c10::make_intrusive<c10d::HashStore>(), 1, 2, 200ms, "", "no GPU.");
  CHECK_THAT(
      outcome.error,
      ContainsText("test on rank 1 of 2: no GPU. Also, test: expected all 2 ranks") &&
          ContainsText("but rank 0 did not come"));
}

TEST_CASE("a world of one waits for nobody", "[comm]") {
  CHECK(attend(nullptr, 0, 1, 1ms).error.empty());
}
