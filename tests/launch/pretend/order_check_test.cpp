#include "launch/pretend/order_check.h"

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ddp/internal/ranges.h>

#include "launch/pretend/training_calls.h"

#include "support/catch.h"

using namespace ddp::launch;
using namespace ddp::testing;
using Kind = OrderFault::Kind;

namespace {

std::vector<OrderFault> faults_of(const std::vector<CallList>& lists) {
  return check_order(lists, find_meetings(lists));
}

std::vector<CallList> lists_of(const Training& training, const std::vector<int>& ranks) {
  std::vector<CallList> lists;
  for (const int rank : ranks) lists.push_back(write_calls(training, rank).list());
  return lists;
}

std::vector<CallList> all_lists(const Training& training) {
  return lists_of(training, ddp::numbers_up_to(training.size()));
}

std::string text_of_all(const std::vector<OrderFault>& faults) {
  std::string text;
  for (const auto& fault : faults)
    text += std::string(name_of(fault.kind)) + ": " + fault.text + "\n";
  return text;
}

/// The finding that a mistake must have: any of the kinds, on that rank, in that group, and the
/// text.
struct Expected {
  Mistake mistake;
  std::set<Kind> kinds;
  std::string group;
  std::vector<std::string> said;
};

const std::vector<Expected> kExpected = {
    {Mistake::SkipsSum, {Kind::MissingCall}, "tp", {"forward of layer 1", "step 1"}},
    {Mistake::SkipsLayer, {Kind::MissingCall}, "tp", {"forward of layer 1", "step 1"}},
    {Mistake::SwappedSplit,
     {Kind::OtherSize},
     "tp",
     {"4096 bytes", "1024 bytes", "forward of layer 1"}},
    {Mistake::WrongAxis, {Kind::MissingCall}, "dp", {"bucket of layer 1"}},
    {Mistake::OddBatch, {Kind::OtherSize}, "dp", {"losses", "12 bytes", "32 bytes", "step 2"}},
    {Mistake::OddMessages, {Kind::OtherSize}, "pp", {"2048 bytes", "forward", "step 2"}},
    {Mistake::TieOnOneStage, {Kind::MissingCall, Kind::ExtraCall}, "tie", {"tied weight"}},
    {Mistake::TieGroupMissing, {Kind::MissingGroup}, "tie", {"tied weight", "to make it"}},
    {Mistake::OtherDtype, {Kind::OtherDtype}, "dp", {"of half", "of float", "bucket of layer 1"}},
    {Mistake::OtherRoot, {Kind::OtherRoot}, "dp", {"parameters", "before the first step"}},
    {Mistake::ExtraBarrier, {Kind::ExtraCall}, "world", {"barrier (a log, step 1)", "one more"}},
    {Mistake::SwappedGroups,
     {Kind::Deadlock},
     "",
     {"bucket of layer", "clip_grad_norm_", "step 1"}},
    {Mistake::MissingWait, {Kind::NeverWaited}, "dp", {"bucket of layer", "step 1"}},
    {Mistake::OtherKind, {Kind::OtherKind}, "dp", {"reduce_scatter", "bucket of layer 1"}},
    {Mistake::ExtraStep, {Kind::ExtraCall}, "dp", {"step 3"}},
    {Mistake::FewerMicrobatches, {Kind::UnmatchedMessage}, "pp", {"forward"}},
    {Mistake::WrongStage, {Kind::UnmatchedMessage}, "pp", {"forward"}},
    {Mistake::SwappedBuckets, {Kind::OtherSize}, "dp", {"in the other order", "bucket of layer"}},
    {Mistake::SkipsBucket, {Kind::MissingCall}, "dp", {"bucket of layer 1", "leaves that one out"}},
    {Mistake::OtherGroups, {Kind::MissingGroup}, "dp", {"has process group"}},
    {Mistake::BothSend, {Kind::Deadlock}, "pp", {"echo", "backward", "wait for each other"}},
};

}  // namespace

TEST_CASE("a mistake of one rank is found, and named", "[pure]") {
  const auto& expected = GENERATE(from_range(kExpected));
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    const auto up_to = [&](int low, int high) {
      return std::uniform_int_distribution<int>(low, high)(random);
    };
    Training training{up_to(3, 4), up_to(3, 5), up_to(3, 4), up_to(2, 4), up_to(1, 3), 3, true};
    training.mistake = expected.mistake;
    training.faulty = up_to(0, training.size() - 1);
    const int stage = training.dp * training.tp;
    // Some are of a stage.
    const bool is_first_stage = expected.mistake == Mistake::FewerMicrobatches ||
                                expected.mistake == Mistake::WrongStage ||
                                expected.mistake == Mistake::BothSend;
    const bool is_end =
        expected.mistake == Mistake::TieOnOneStage || expected.mistake == Mistake::TieGroupMissing;
    if (is_first_stage) training.faulty %= stage;
    if (is_end) training.faulty = training.faulty % stage + (training.pp - 1) * stage;

    const auto lists = all_lists(training);
    const auto faults = faults_of(lists);
    CAPTURE(seed, training.faulty, text_of_all(faults));
    const auto fits = [&](const OrderFault& fault) {
      return expected.kinds.count(fault.kind) > 0 &&
             fault.text.find(expected.group) != std::string::npos &&
             ddp::all_of(expected.said, [&](const std::string& part) {
               return fault.text.find(part) != std::string::npos;
             });
    };
    const auto found = ddp::find_if(faults, fits);
    REQUIRE(found != faults.end());
    if (found->kind != Kind::OtherSize || expected.group != "pp") {
      CHECK_THAT(found->text, ContainsText("rank " + std::to_string(training.faulty)));
    }
    // A group of two cannot tell which of them is wrong.
    const bool is_named = expected.group != "pp" && expected.group != "tie";
    if (is_named) CHECK(ddp::contains(found->ranks, training.faulty));
    const bool is_alone =
        is_named && found->kind != Kind::Deadlock && found->kind != Kind::MissingGroup;
    if (is_alone) CHECK(found->ranks == std::vector<int>{training.faulty});
  }
}

TEST_CASE("nothing is said of right programs, whichever of their ranks are present", "[pure]") {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    const auto up_to = [&](int low, int high) {
      return std::uniform_int_distribution<int>(low, high)(random);
    };
    const Training training{up_to(1, 3), up_to(1, 3), up_to(1, 3),     up_to(1, 3),
                            up_to(1, 4), up_to(1, 4), up_to(0, 1) == 1};
    CAPTURE(seed);
    CHECK(text_of_all(faults_of(all_lists(training))).empty());
    std::vector<int> some;
    for (int rank = 0; rank < training.size(); ++rank) {
      if (up_to(0, 1) == 1) some.push_back(rank);
    }
    CHECK(text_of_all(faults_of(lists_of(training, some))).empty());
  }
}

TEST_CASE("nothing is said of calls after the end of a list that was broken off", "[pure]") {
  const Training training{2, 2, 2, 2, 2, 2, true};
  for (unsigned seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    std::vector<CallList> lists;
    for (int rank = 0; rank < training.size(); ++rank) {
      const auto text = write_calls(training, rank).file();
      const auto end = std::uniform_int_distribution<size_t>(40, text.size())(random);
      const bool is_cut = random() % 2 == 0;
      lists.push_back(parse_call_list("list", is_cut ? text.substr(0, end) : text));
    }
    CAPTURE(seed);
    CHECK(text_of_all(faults_of(lists)).empty());
  }
}

TEST_CASE("a fault is said in the words of errors", "[pure]") {
  std::vector<CallList> lists;
  for (int rank = 0; rank < 3; ++rank) {
    WrittenCalls calls(rank, 3);
    const int group = calls.group("default_pg", "world", {0, 1, 2});
    calls.call_and_wait(group, "all_reduce", rank == 1 ? 8 : 4, "loss");
    lists.push_back(calls.list());
  }
  const auto faults = faults_of(lists);
  REQUIRE(faults.size() == 1);
  CHECK(
      faults[0].text ==
      "process group \"default_pg\" (world, ranks 0-2): expected every rank to call the same "
      "collective number 0, but ranks 0, 2 called all_reduce of 4 bytes of float (loss, before the "
      "first step) and rank 1 all_reduce of 8 bytes of float (loss, before the first step). Call "
      "the same collectives with tensors of equal sizes and dtypes in the same order on all "
      "ranks.");
}

TEST_CASE("ranks that wait for each other are named with calls and groups", "[pure]") {
  std::vector<CallList> lists;
  for (int rank = 0; rank < 2; ++rank) {
    WrittenCalls calls(rank, 2);
    const int one = calls.group("one", "group", {0, 1}), two = calls.group("two", "group", {0, 1});
    calls.call_and_wait(rank == 0 ? one : two, "barrier", 0);
    calls.call_and_wait(rank == 0 ? two : one, "barrier", 0);
    lists.push_back(calls.list());
  }
  const auto faults = faults_of(lists);
  REQUIRE(faults.size() == 1);
  CHECK(faults[0].ranks == std::vector<int>{0, 1});
  CHECK(
      faults[0].text ==
      "deadlock: rank 0 waits in barrier (before the first step), number 0 of process group "
      "\"one\" (group, ranks 0, 1), for rank 1; rank 1 waits in barrier (before the first step), "
      "number 0 of process group \"two\" (group, ranks 0, 1), for rank 0: they wait for each "
      "other. Make the collectives of all ranks in the same order across groups.");
}

TEST_CASE("calls that no rank waits for before others have come are no deadlock", "[pure]") {
  std::vector<CallList> lists;
  for (int rank = 0; rank < 2; ++rank) {
    WrittenCalls calls(rank, 2);
    const int one = calls.group("one", "group", {0, 1}), two = calls.group("two", "group", {0, 1});
    const int first = calls.call(rank == 0 ? one : two, "barrier", 0);
    const int second = calls.call(rank == 0 ? two : one, "barrier", 0);
    calls.wait(first);
    calls.wait(second);
    lists.push_back(calls.list());
  }
  CHECK(text_of_all(faults_of(lists)).empty());
}

TEST_CASE("parts of an all_to_all and of a scatter may differ", "[pure]") {
  std::vector<CallList> lists;
  for (int rank = 0; rank < 2; ++rank) {
    WrittenCalls calls(rank, 2);
    const int group = calls.group("one", "group", {0, 1});
    calls.call_and_wait(group, "all_to_all", 4 + 8 * rank);
    calls.call_and_wait(group, "scatter", rank == 0 ? 8 : 0, "", 0);
    lists.push_back(calls.list());
  }
  CHECK(text_of_all(faults_of(lists)).empty());
}

TEST_CASE("messages meet by their tags", "[pure]") {
  std::vector<CallList> lists;
  for (int rank = 0; rank < 2; ++rank) {
    WrittenCalls calls(rank, 2);
    calls.group("one", "group", {0, 1});
    const std::string kind = rank == 0 ? "send" : "recv";
    for (int i = 0; i < 2; ++i) {
      const int tag = rank == 0 ? i : 1 - i;
      calls.put(ddp::str(
          "call\t", i, "\t0\t0\t", kind, "\tfloat\t", 4 + tag, "\t", 1 - rank, "\t\t", tag));
    }
    for (int i = 0; i < 2; ++i) calls.put(ddp::str("wait\t0\t", i));
    lists.push_back(calls.list());
  }
  CHECK(text_of_all(faults_of(lists)).empty());
}

TEST_CASE("messages without tags meet by their sizes", "[pure]") {
  // A receiver that asks for the next header before it asks for the data.
  std::vector<CallList> lists;
  for (int rank = 0; rank < 2; ++rank) {
    WrittenCalls calls(rank, 2);
    const int group = calls.group("one", "group", {0, 1});
    std::vector<int> works;
    const std::vector<int> sizes =
        rank == 0 ? std::vector<int>{8, 400, 8, 400} : std::vector<int>{8, 8, 400, 400};
    for (const int size : sizes) {
      works.push_back(calls.call(group, rank == 0 ? "send" : "recv", size, "", 1 - rank));
    }
    for (const int work : works) calls.wait(work);
    lists.push_back(calls.list());
  }
  CHECK(text_of_all(faults_of(lists)).empty());
}

TEST_CASE("a mesh's group is named once", "[pure]") {
  std::vector<CallList> lists;
  for (int rank = 0; rank < 2; ++rank) {
    WrittenCalls calls(rank, 2);
    const int group = calls.group("dp [0, 1]", "dp", {0, 1});
    calls.call_and_wait(group, rank == 0 ? "barrier" : "all_reduce", 4);
    lists.push_back(calls.list());
  }
  CHECK_THAT(
      text_of_all(faults_of(lists)), ContainsText("process group \"dp [0, 1]\": expected every"));
}

TEST_CASE("the k-th of several groups with one name meets the k-th of the other ranks", "[pure]") {
  std::vector<CallList> lists;
  for (int rank = 0; rank < 2; ++rank) {
    WrittenCalls calls(rank, 2);
    const int one = calls.group("same", "group", {0, 1});
    const int two = calls.group("same", "group", {0, 1});
    const int first = calls.call(rank == 0 ? one : two, "all_reduce", rank == 0 ? 4 : 8);
    const int second = calls.call(rank == 0 ? two : one, "all_reduce", rank == 0 ? 8 : 4);
    calls.wait(first);
    calls.wait(second);
    lists.push_back(calls.list());
  }
  CHECK(text_of_all(faults_of(lists)).empty());
}

TEST_CASE("a deadlock that follows from another fault is not said", "[pure]") {
  std::vector<CallList> lists;
  for (int rank = 0; rank < 2; ++rank) {
    WrittenCalls calls(rank, 2);
    const int one = calls.group("one", "group", {0, 1}), two = calls.group("two", "group", {0, 1});
    if (rank == 0) calls.call_and_wait(one, "barrier", 0);
    calls.call_and_wait(two, "barrier", 0);
    calls.call_and_wait(one, "barrier", 0);
    lists.push_back(calls.list());
  }
  const auto faults = faults_of(lists);
  REQUIRE(faults.size() == 1);
  CHECK(faults[0].kind == Kind::MissingCall);
  CHECK(faults[0].ranks == std::vector<int>{1});
}
