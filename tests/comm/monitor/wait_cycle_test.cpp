// Which blocked ranks wait for each other.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <ddp/internal/text.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/calls/call_history.h"
#include "comm/monitor/job_monitor.h"
#include "comm/monitor/late_waits.h"
#include "comm/monitor/rank_report.h"
#include "comm/monitor/wait_cycle.h"
#include "comm/plain_store.h"

#include "support/catch.h"

namespace ddp::wait_cycle_test {
namespace {

constexpr int kAll = AwaitedCall::kAll;
using Waits = std::vector<AwaitedCall>;

AwaitedCall wait_in(const std::string& list, uint64_t number, int needs = kAll) {
  return {list, number, needs, "waits in " + list};
}

std::string found_in(const std::vector<BlockedRank>& ranks) {
  std::string found;
  for (const auto& [rank, text] : find_wait_cycle(ranks)) {
    found += ddp::str(found.empty() ? "" : ", ", rank, ' ', text);
  }
  return found;
}

// A waits in tp for B, which waits in dp for A.
BlockedRank a() { return {0, {wait_in("tp", 7)}, {{"tp", 8}, {"dp", 3}}}; }
BlockedRank b() { return {1, {wait_in("dp", 3)}, {{"tp", 7}, {"dp", 4}}}; }

}  // namespace

TEST_CASE("ranks that wait for each other are found", "[comm][monitor]") {
  CHECK(found_in({a(), b()}) == "0 waits in tp, 1 waits in dp");
  CHECK(
      found_in({a(), b(), {2, {wait_in("tp", 7)}, {{"tp", 8}}}}) == "0 waits in tp, 1 waits in dp");
  const std::vector<BlockedRank> three{
      {0, {wait_in("x", 0)}, {{"x", 1}, {"z", 0}}},
      {1, {wait_in("y", 5)}, {{"y", 6}, {"x", 0}}},
      {2, {wait_in("z", 0)}, {{"z", 1}, {"y", 2}}}};
  CHECK(found_in(three) == "0 waits in x, 1 waits in y, 2 waits in z");
}

TEST_CASE("no ranks wait for each other", "[comm][monitor]") {
  CHECK(found_in({}).empty());
  CHECK(found_in({a()}).empty());
  SECTION("if one has come, though it waits elsewhere") {
    auto came = b();
    came.made["tp"] = 8;
    CHECK(found_in({a(), came}).empty());
  }
  SECTION("if one waits for a call before those that the other has not made") {
    auto earlier = a();
    earlier.waits[0].number = 6;
    CHECK(found_in({earlier, b()}).empty());
  }
  SECTION("if one is not in the other's group") {
    auto elsewhere = b();
    elsewhere.made.erase("tp");
    CHECK(found_in({a(), elsewhere}).empty());
  }
  SECTION("if one waits for a third rank alone") {
    auto from_root = a();
    from_root.waits[0].needs = 2;
    CHECK(found_in({from_root, b()}).empty());
    from_root.waits[0].needs = 1;
    CHECK_FALSE(found_in({from_root, b()}).empty());
  }
  SECTION("in a chain, whose last rank is not blocked") {
    const BlockedRank c{2, {wait_in("pp", 0)}, {{"pp", 1}, {"dp", 3}}};
    auto first = b();
    first.made["tp"] = 8;
    CHECK(found_in({first, c}).empty());
  }
}

TEST_CASE("a rank with several threads waits with all of them", "[comm][monitor]") {
  auto two = a();
  two.made["pp"] = 2;
  two.waits.push_back(wait_in("pp", 1));
  // Nobody is blocked who would have to come to its second wait.
  CHECK(found_in({two, b()}).empty());
  auto other = b();
  other.made["pp"] = 1;
  CHECK(found_in({two, other}) == "0 waits in tp, 1 waits in dp");
}

TEST_CASE("the shortest cycle is found", "[comm][monitor]") {
  // Each waits for the next one; 3 also for 2.
  std::vector<BlockedRank> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    const auto own = ddp::str("g", rank), before = ddp::str("g", (rank + 3) % 4);
    ranks.push_back({rank, {wait_in(own, 0)}, {{own, 1}, {before, 0}}});
  }
  CHECK(found_in(ranks) == "0 waits in g0, 1 waits in g1, 2 waits in g2, 3 waits in g3");
  ranks[2].made["g3"] = 0;
  CHECK(found_in(ranks) == "2 waits in g2, 3 waits in g3");
}

TEST_CASE("a deadlock's text names the waits and a few of many", "[comm][monitor][errors]") {
  CHECK(
      to_text(std::vector<WaitOfRank>{{0, "rank 0 waits in tp"}, {1, "rank 1 waits in dp"}}) ==
      "deadlock: rank 0 waits in tp for rank 1; rank 1 waits in dp for rank 0: they wait for each "
      "other. Make the collectives of all ranks in the same order across groups");
  CHECK_THAT(
      to_text(std::vector<WaitOfRank>(20, {3, "x"})),
      ContainsText("x for rank 3; and 12 more ranks: they wait"));
}

TEST_CASE("a rank's report is read as it was written", "[comm][monitor]") {
  RankReport report{"127.0.0.1:5", "key", "all_reduce", 12, a(), "tp [2, 3]"};
  report.blocked.waits[0].needs = 1;
  report.blocked.waits[0].text = "a\ttab, 3:colon\n";
  const auto read = parse_report(to_text(report));
  CHECK(to_text(read) == to_text(report));
  CHECK((read.address == "127.0.0.1:5" && read.where == "all_reduce" && read.steps == 12));
  CHECK((read.group == "key" && read.group_name == "tp [2, 3]"));
  CHECK((read.blocked.waits[0].needs == 1 && read.blocked.made == a().made));
  for (const char* other :
       {"", "\t", "x", "x\ty\tz\tw", "x\ty\tz\t3\tn\t9:", "x\ty\tz\t3\tn\t1:a1:b"}) {
    CAPTURE(other);
    CHECK(parse_report(other).blocked.waits.empty());
  }
}

namespace {

ddp::CollectiveCall barrier() {
  ddp::CollectiveCall call;
  call.kind = ddp::CollectiveKind::Barrier;
  return call;
}

/// A rank that waits for a call of a group of two, in which it has made one.
struct Waiting {
  Waiting(int rank, const std::string& waits_in, const std::string& other) : late(rank, 2, "") {
    calls->add(CallHistory::Lane::kCpu, barrier());
    late.add_group(waits_in, calls, {0, 1});
    late.add_group(other, idle, {0, 1});
    wait = late.begin({waits_in, "barrier", 0, wait_in(waits_in + " cpu", 0)});
  }
  std::shared_ptr<CallHistory> calls = std::make_shared<CallHistory>();
  std::shared_ptr<CallHistory> idle = std::make_shared<CallHistory>();
  LateWaits late;
  uint64_t wait = 0;
};

void look_fails(c10d::Store& store) {
  Waiting first(0, "x", "y"), second(1, "y", "x");
  store.set(ddp::report_key(0), std::vector<uint8_t>{});
  store.set(ddp::report_key(1), std::vector<uint8_t>{});
  CHECK_FALSE(first.late.look(store));
  CHECK_FALSE(second.late.look(store));  // the first looks for all
  CHECK_FALSE(first.late.look(store));
  second.late.end(second.wait);
  second.late.publish(store);
  CHECK_FALSE(first.late.look(store));  // the cycle has ended
  second.wait = second.late.begin({"y", "barrier", 0, wait_in("y cpu", 0)});
  second.late.publish(store);
  CHECK_FALSE(first.late.look(store));
  CHECK_FALSE(second.late.look(store));
  const auto failure = first.late.look(store);
  REQUIRE(failure);
  CHECK_THAT(*failure, ContainsText("waits in x cpu for rank 1; waits in y cpu for rank 0"));
}

}  // namespace

TEST_CASE("one of the ranks looks for all, and fails what it sees twice", "[comm][monitor]") {
  c10d::HashStore store;
  look_fails(store);
  ddp::testing::PlainStore plain;
  look_fails(plain);
}

TEST_CASE("a rank whose wait failed looks in place of another one", "[comm][monitor]") {
  c10d::HashStore store;
  store.set(ddp::report_key(0), std::vector<uint8_t>{});
  store.set(ddp::report_key(1), std::vector<uint8_t>{});
  Waiting first(0, "x", "x"), second(1, "x", "x");
  first.calls->add(CallHistory::Lane::kCpu, barrier());
  auto broadcast = barrier();
  broadcast.kind = ddp::CollectiveKind::Broadcast;
  broadcast.root = 1;
  second.calls->add(CallHistory::Lane::kCpu, broadcast);
  first.late.add_group("x", first.calls, {0, 1});
  second.late.add_group("x", second.calls, {0, 1});
  CHECK_FALSE(first.late.look(store));
  CHECK_FALSE(second.late.look(store));  // the first looks for all
  second.late.take_over();
  CHECK_FALSE(second.late.look(store));  // another one may take it over, too
  CHECK(store.get_to_str("looker") == "1");
  const auto failure = second.late.look(store);
  REQUIRE(failure);
  CHECK_THAT(*failure, ContainsText("expected every rank to call the same collective number 1"));
  CHECK(store.get_to_str("failure") == *failure);
  CHECK_FALSE(first.late.look(store));  // it has lost the part
}

TEST_CASE("another rank looks after the one that looked goes on", "[comm][monitor]") {
  c10d::HashStore store;
  Waiting first(0, "x", "y"), second(1, "x", "y"), third(1, "y", "x");
  store.set(ddp::report_key(0), std::vector<uint8_t>{});
  store.set(ddp::report_key(1), std::vector<uint8_t>{});
  CHECK_FALSE(first.late.look(store));
  CHECK_FALSE(second.late.look(store));
  CHECK(store.get_to_str("looker") == "0");
  first.late.end(first.wait);
  first.late.publish(store);
  CHECK_FALSE(second.late.look(store));
  CHECK(store.get_to_str("looker") == "1");
}

TEST_CASE("a rank with a thread that does not wait is not blocked", "[comm][monitor]") {
  c10d::HashStore store;
  Waiting rank(0, "x", "y");
  const auto is_blocked = [&] {
    rank.late.publish(store);
    return !ddp::read_reports(store, {0}).front().blocked.waits.empty();
  };
  CHECK(is_blocked());
  std::thread([&] { rank.idle->add(CallHistory::Lane::kCpu, {}); }).join();
  CHECK_FALSE(is_blocked());
  // Calls that are no longer kept do not count.
  for (size_t i = 0; i < CallHistory::kKept; ++i) rank.idle->add(CallHistory::Lane::kCpu, {});
  CHECK(is_blocked());
  // The same thread cannot wait twice, but another group's wait has no known call.
  const auto unknown = rank.late.begin({"y", "recv", 0, {}});
  CHECK_FALSE(is_blocked());
  rank.late.end(unknown);
  CHECK(is_blocked());
}

TEST_CASE("a call is found by its handle while it is kept", "[comm][monitor]") {
  CallHistory history;
  const auto lane = CallHistory::Lane::kDevice;
  const int first = 0, second = 0;
  history.set_handle(lane, history.add(lane, {}), &first);
  history.set_handle(lane, history.add(lane, {}), &second);
  REQUIRE(history.find(&second));
  CHECK((history.find(&second)->number == 1 && history.find(&second)->lane == lane));
  CHECK(history.find(&first)->number == 0);
  history.set_handle(lane, history.add(lane, {}), &first);  // the address is another call's
  CHECK(history.find(&first)->number == 2);
  CHECK_FALSE(history.find(&history));
  for (size_t i = 0; i < CallHistory::kKept; ++i) history.add(lane, {});
  CHECK_FALSE(history.find(&first));
}

}  // namespace ddp::wait_cycle_test
