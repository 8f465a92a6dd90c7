// Records of the ranks' calls, and the first call in which two ranks differ.
#include <string>
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/calls/call_history.h"
#include "comm/calls/collective_call.h"
#include "comm/monitor/compare_calls.h"
#include "comm/plain_store.h"
#include "comm/watched_store.h"

#include "support/catch.h"

using ddp::CallHistory;
using ddp::CallList;
using ddp::CallRecord;
using ddp::CollectiveCall;
using ddp::CollectiveKind;
using ddp::compare_calls;
using ddp::describe_call;

namespace {

constexpr auto kLane = CallHistory::Lane::kCpu;

/// Makes an all-reduce that differs for each letter.
CollectiveCall call_of(char letter) {
  CollectiveCall call;
  call.kind = CollectiveKind::AllReduce;
  call.dtype = 6;  // Float
  call.reduction = 0;
  call.numel = static_cast<uint64_t>(letter);
  return call;
}

CallRecord record_of(int rank, const std::string& letters, uint64_t first = 0) {
  CallRecord record{rank, 0, "", {first, {}}};
  for (const char letter : letters) record.list.calls.push_back(call_of(letter));
  return record;
}

/// Lets ranks compare their calls one after the other; returns the difference found: "0/2 at 3".
std::string found_by(c10d::Store& store, const std::vector<CallRecord>& records) {
  for (const auto& record : records) {
    if (const auto desync = compare_calls(store, kLane, record)) {
      return std::to_string(desync->lower.rank) + "/" + std::to_string(desync->upper.rank) +
             " at " + std::to_string(desync->number);
    }
  }
  return "";
}

std::string found_by(const std::vector<CallRecord>& records) {
  c10d::HashStore store;
  ddp::testing::PlainStore plain;  // of a user's own class, without compareSet
  const auto found = found_by(store, records);
  CHECK(found_by(plain, records) == found);
  return found;
}

}  // namespace

TEST_CASE("two ranks that called different collectives are found", "[comm]") {
  CHECK(found_by({record_of(0, "aab"), record_of(1, "aab")}).empty());
  CHECK(found_by({record_of(0, "aab"), record_of(1, "aac")}) == "0/1 at 2");
  CHECK(found_by({record_of(1, "aac"), record_of(0, "aab")}) == "0/1 at 2");
  CHECK(found_by({record_of(2, "aba"), record_of(0, "aba"), record_of(1, "acb")}) == "1/2 at 1");
  CHECK(found_by({record_of(0, "abcd"), record_of(1, "acd")}) == "0/1 at 1");  // leaves one out
}

TEST_CASE("a rank that has called fewer collectives, all the same, does not differ", "[comm]") {
  CHECK(found_by({record_of(0, "aab"), record_of(1, "aa")}).empty());
  CHECK(found_by({record_of(1, "a"), record_of(0, "aab"), record_of(2, "aa")}).empty());
  CHECK(found_by({record_of(0, ""), record_of(1, "aab")}).empty());
  // A rank with fewer calls is compared with the other ranks' calls of the same numbers.
  CHECK(found_by({record_of(0, "aab"), record_of(1, "ab")}) == "0/1 at 1");
}

TEST_CASE(
    "ranks that compare one after the other, each with more calls, are all compared", "[comm]") {
  CHECK(found_by({record_of(0, "a"), record_of(1, "ab"), record_of(2, "ac")}) == "1/2 at 1");
  CHECK(found_by({record_of(0, "ab"), record_of(0, "abcd"), record_of(1, "abce")}) == "0/1 at 3");
}

TEST_CASE("a record with older calls is replaced, one with much newer calls is not", "[comm]") {
  c10d::HashStore store;
  const auto old = record_of(0, "aa"), now = record_of(1, "bbc", 100), far = record_of(2, "b", 50);
  CHECK(found_by(store, {old, now, far}).empty());
  CHECK(found_by(store, {record_of(0, "bbd", 100)}) == "0/1 at 102");
}

TEST_CASE("lanes are compared separately", "[comm]") {
  c10d::HashStore store;
  CHECK_FALSE(compare_calls(store, CallHistory::Lane::kCpu, record_of(0, "ab")));
  CHECK_FALSE(compare_calls(store, CallHistory::Lane::kDevice, record_of(1, "ba")));
  CHECK(compare_calls(store, CallHistory::Lane::kDevice, record_of(0, "ab")));
}

TEST_CASE("a rank makes at most two requests to the store to compare its calls", "[comm]") {
  int requests = 0;
  ddp::testing::WatchedStore store(
      c10::make_intrusive<c10d::HashStore>(), [&](auto&) { ++requests; });
  for (const auto& letters : {"ab", "ab", "abc", "a"}) {
    requests = 0;
    compare_calls(store, kLane, record_of(1, letters));
    CAPTURE(letters);
    CHECK(requests == (letters == std::string("abc") ? 2 : 1));
  }
}

TEST_CASE("the text has both ranks' calls, and the calls before and after them", "[comm]") {
  auto lower = record_of(0, "abcdefghijklmn"), upper = record_of(1, "abcdefgx");
  lower.where = "all_reduce";
  upper.where = "reducing bucket 3 of 5\tand\nmore";
  c10d::HashStore store;
  CHECK_FALSE(compare_calls(store, kLane, upper));
  const auto desync = compare_calls(store, kLane, lower);
  REQUIRE(desync);
  const auto call = [](int number, char letter) {
    return std::to_string(number) + " all_reduce of " + std::to_string(int{letter}) +
           " x Float, SUM";
  };
  CHECK(
      ddp::to_text(*desync) ==
      "expected every rank to call the same collective number 7, but rank 0 called all_reduce of "
      "104 x Float, SUM and rank 1 all_reduce of 120 x Float, SUM. Call the same collectives with "
      "tensors of equal sizes and dtypes in the same order on all ranks. Their last calls: both "
      "called " +
          call(2, 'c') + "; " + call(3, 'd') + "; " + call(4, 'e') + "; " + call(5, 'f') + "; " +
          call(6, 'g') + "; then rank 0 called " + call(7, 'h') + "; " + call(8, 'i') + "; " +
          call(9, 'j') + "; " + call(10, 'k') + "; " + call(11, 'l') +
          "; and 2 more, and waits in all_reduce; rank 1 called " + call(7, 'x') +
          ", and waits in reducing bucket 3 of 5\tand\nmore");
}

TEST_CASE("a history keeps the latest calls of each lane", "[comm]") {
  CallHistory history;
  CHECK(history.read(kLane).calls.empty());
  for (int i = 0; i < 1000; ++i) {
    auto call = call_of('a');
    call.numel = static_cast<uint64_t>(i);
    CHECK(history.add(kLane, call) == static_cast<uint64_t>(i));
  }
  history.remove_latest(kLane, 500);  // not the latest
  CHECK(history.read(kLane).end() == 1000);
  // A call that was not started is removed, and all kept calls are right.
  history.remove_latest(kLane, history.add(kLane, call_of('z')));
  const auto list = history.read(kLane);
  CHECK(list.end() == 1000);
  CHECK(list.calls.size() == CallHistory::kKept);
  for (auto number = list.first; number < list.end(); ++number) {
    CHECK(list.at(number).numel == number);
  }
  CHECK(history.read(CallHistory::Lane::kDevice).end() == 0);
}

TEST_CASE("calls differ if a property that all ranks must call alike differs", "[comm]") {
  const auto two = std::vector<at::Tensor>{at::empty({2, 5}), at::empty({4})};
  const auto turned = std::vector<at::Tensor>{at::empty({4}), at::empty({5, 2})};
  using Kind = CollectiveKind;
  const std::vector<CollectiveCall> different{
      describe_call(Kind::Barrier, {}),
      describe_call(Kind::AllReduce, at::empty({10}), 0),
      describe_call(Kind::AllReduce, at::empty({11}), 0),
      describe_call(Kind::AllReduce, at::empty({10}, at::kInt), 0),
      describe_call(Kind::AllReduce, at::empty({10}), 4),
      describe_call(Kind::AllReduce, two, 0),
      describe_call(Kind::AllReduce, turned, 0),
      describe_call(Kind::Reduce, at::empty({10}), 0, 1),
      describe_call(Kind::Reduce, at::empty({10}), 0, 0),
      describe_call(Kind::Broadcast, at::empty({10}), -1, 0),
      describe_call(Kind::AllToAll, at::empty({10}))};
  for (size_t i = 0; i < different.size(); ++i) {
    for (size_t j = 0; j < different.size(); ++j) {
      CAPTURE(ddp::to_text(different[i]), ddp::to_text(different[j]));
      CHECK((different[i] == different[j]) == (i == j));
      CHECK((different[i].hash() == different[j].hash()) == (i == j));
    }
  }
  CHECK(
      describe_call(Kind::AllReduce, at::empty({2, 5}), 0) ==
      describe_call(Kind::AllReduce, at::empty({10}), 0));
  CHECK(
      describe_call(Kind::AllToAll, at::empty({3})) ==
      describe_call(Kind::AllToAll, at::empty({10})));  // each rank sends its own number
  CHECK(ddp::to_text(different[8]) == "reduce of 10 x Float to rank 0, SUM");
  CHECK(ddp::to_text(different[9]) == "broadcast of 10 x Float from rank 0");
  CHECK(ddp::to_text(different[10]) == "all_to_all of Float");
  CHECK_THAT(ddp::to_text(different[5]), ContainsText("all_reduce of 14 x Float in 2 tensors of"));
}

TEST_CASE("similar calls differ in the bits of a tag", "[comm]") {
  // Gloo's tags have the upper 16 bits: of 4000 sizes, about 120 pairs share them by chance.
  std::vector<size_t> seen(1 << 16, 0);
  size_t shared = 0;
  auto call = call_of('a');
  for (call.numel = 0; call.numel < 4000; ++call.numel) shared += seen[call.hash() >> 48]++;
  CHECK(shared < 240);
}

TEST_CASE("a record that no rank has written is replaced", "[comm]") {
  for (const std::string text :
       {"", "nonsense", "0 0 0 1 200 0 0 0 1 0 1", "0 0 0 1 0 0 99 0 1 0 1", "0 0 0 5 0 6 0 -1"}) {
    CAPTURE(text);
    c10d::HashStore store;
    store.set("calls", std::vector<uint8_t>(text.begin(), text.end()));
    CHECK(found_by(store, {record_of(1, "ab"), record_of(2, "ac")}) == "1/2 at 1");
  }
}
