// Records of the ranks' calls, and the first call in which two ranks differ.
#include <string>
#include <vector>

#include <ATen/ops/empty.h>

#include "comm/calls/call_history.h"
#include "comm/calls/collective_call.h"
#include "comm/monitor/call_difference.h"

#include "support/catch.h"

using ddp::CallHistory;
using ddp::CallList;
using ddp::CollectiveCall;
using ddp::CollectiveKind;
using ddp::describe_call;
using ddp::find_call_difference;
using ddp::RankCalls;

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

RankCalls calls_of(
    int rank, const std::string& letters, uint64_t first = 0, const std::string& list = "dp cpu") {
  RankCalls calls{rank, list, "dp", "", 0, {}, {first, {}}};
  for (const char letter : letters) calls.calls.calls.push_back(call_of(letter));
  return calls;
}

/// The difference that is found: "0/2 at 3".
std::string found_in(const std::vector<RankCalls>& ranks) {
  const auto difference = find_call_difference(ranks);
  if (!difference) return "";
  return std::to_string(difference->lower.rank) + "/" + std::to_string(difference->upper.rank) +
         " at " + std::to_string(difference->number);
}

}  // namespace

TEST_CASE("two ranks that called different collectives are found", "[comm]") {
  CHECK(found_in({calls_of(0, "aab"), calls_of(1, "aab")}).empty());
  CHECK(found_in({calls_of(0, "aab"), calls_of(1, "aac")}) == "0/1 at 2");
  CHECK(found_in({calls_of(1, "aac"), calls_of(0, "aab")}) == "0/1 at 2");
  CHECK(found_in({calls_of(2, "aba"), calls_of(0, "aba"), calls_of(1, "acb")}) == "1/2 at 1");
  CHECK(found_in({calls_of(0, "abcd"), calls_of(1, "acd")}) == "0/1 at 1");  // leaves one out
}

TEST_CASE("a rank that has called fewer collectives, all the same, does not differ", "[comm]") {
  CHECK(found_in({calls_of(0, "aab"), calls_of(1, "aa")}).empty());
  CHECK(found_in({calls_of(1, "a"), calls_of(0, "aab"), calls_of(2, "aa")}).empty());
  CHECK(found_in({calls_of(0, ""), calls_of(1, "aab")}).empty());
  // A rank with fewer calls is compared with the other ranks' calls of the same numbers.
  CHECK(found_in({calls_of(0, "aab"), calls_of(1, "ab")}) == "0/1 at 1");
}

TEST_CASE("calls that no other rank keeps any more differ from none", "[comm]") {
  const auto old = calls_of(0, "aa"), now = calls_of(1, "bbc", 100), far = calls_of(2, "b", 50);
  CHECK(found_in({old, now, far}).empty());
  CHECK(found_in({old, now, far, calls_of(3, "bbd", 100)}) == "1/3 at 102");
}

TEST_CASE("lists are compared separately", "[comm]") {
  const std::string on_device = "dp device";
  CHECK(found_in({calls_of(0, "ab"), calls_of(1, "ba", 0, on_device)}).empty());
  CHECK(
      found_in(
          {calls_of(0, "ab"), calls_of(2, "ba", 0, on_device), calls_of(0, "ab", 0, on_device),
           calls_of(1, "ab")}) == "0/2 at 0");
  CHECK(found_in({}).empty());
}

TEST_CASE("the text has both ranks' calls, and the calls before and after them", "[comm]") {
  auto lower = calls_of(0, "abcdefghijklmn"), upper = calls_of(1, "abcdefgx");
  lower.where = "all_reduce";
  upper.where = "reducing bucket 3 of 5\tand\nmore";
  const auto difference = find_call_difference({upper, lower});
  REQUIRE(difference);
  const auto call = [](int number, char letter) {
    return std::to_string(number) + " all_reduce of " + std::to_string(int{letter}) +
           " x Float, SUM";
  };
  CHECK(
      ddp::to_text(*difference) ==
      "process group \"dp\": expected every rank to call the same collective number 7, but rank 0 "
      "called all_reduce of "
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

TEST_CASE("the text names the rank that ran a step more", "[comm]") {
  auto lower = calls_of(0, "aab"), upper = calls_of(1, "aac");
  lower.steps = 3;
  upper.steps = 4;
  upper.steps_text = {"ran a step that", "Run as many"};
  CHECK_THAT(
      ddp::to_text(*find_call_difference({lower, upper})),
      Catch::Matchers::StartsWith(
          "rank 1 ran a step that rank 0 did not. Run as many: process group \"dp\": expected"));
}

TEST_CASE("a rank's calls are read as they were written", "[comm]") {
  auto calls = calls_of(3, "abc", 70);
  calls.where = "reducing bucket 3 of 5\tand\nmore 3:";
  calls.steps = 12;
  calls.steps_text = {"began", "rule"};
  const std::vector<RankCalls> all{calls, calls_of(3, "", 5, "tp device")};
  const auto read = ddp::parse_calls(3, ddp::to_text(all));
  REQUIRE(read.size() == 2);
  CHECK(ddp::to_text(read) == ddp::to_text(all));
  CHECK((read[0].rank == 3 && read[0].where == calls.where && read[0].calls.end() == 73));
  CHECK((read[0].steps == 12 && read[0].steps_text.rule == "rule" && read[0].list == "dp cpu"));

  // A text that no rank has written has no calls; a part that is whole may count.
  const auto packed = ddp::to_text(all);
  for (size_t length = 1; length < packed.size(); ++length) {
    const auto part = ddp::parse_calls(3, packed.substr(0, length));
    CAPTURE(length);
    CHECK((part.empty() || packed.find(ddp::to_text(part)) == 0));
  }
  for (const char* text : {"nonsense", "1:a", "99999999999999999999:a", "18446744073709551615:a"}) {
    CHECK(ddp::parse_calls(0, text).empty());
  }
}
