// A wrapper's count of forward passes: which of them end the waits of other ranks.
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <ddp/collectives.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <ddp/internal/forward_count.h>
#include "comm/plain_store.h"
#include "comm/watched_store.h"
#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace std::chrono_literals;
using namespace testing;

// Long enough that a rank which waits reads what the others recorded.
constexpr auto kLate = 1500ms;

void sum_ones(const Rank& self) {
  auto ones = torch::ones({4});
  all_reduce(ones, self.group);
}

void begin_and_fail(ForwardCount& count, const std::string& why) {
  count.begin();
  count.fail(why);
}

std::vector<std::string> reasons_of(const std::vector<FailedForward>& forwards) {
  std::vector<std::string> texts;
  for (const auto& forward : forwards) {
    texts.push_back(
        std::to_string(forward.rank) + "/" + std::to_string(forward.number) + " " + forward.why);
  }
  return texts;
}

}  // namespace

TEST_CASE("a forward pass that throws on all ranks does not fail the group", "[ranks][forwards]") {
  const auto errors = errors_of_ranks(3, [](const Rank& self) {
    ForwardCount count(monitor_of(self.group));
    for (int i = 0; i < 2; ++i) begin_and_fail(count, "boom everywhere");
    count.begin();
    if (self.rank == 1) std::this_thread::sleep_for(kLate);
    sum_ones(self);
  });
  CHECK(errors == std::vector<std::string>(3));
}

TEST_CASE("a rank whose forward threw alone ends those that wait", "[ranks][errors][forwards]") {
  const auto seen = run_ranks<TimedError>(3, kLongTimeout, [](const Rank& self) -> TimedError {
    ForwardCount count(monitor_of(self.group));
    begin_and_fail(count, "boom everywhere");
    count.begin();
    sum_ones(self);
    TimedError seen;
    if (self.rank == 1) {
      count.fail("boom on rank 1 alone");
    } else {
      seen = timed_error_of([&] { sum_ones(self); });
    }
    self.wait_until_others_end();
    return seen;
  });
  for (const int rank : {0, 2}) {
    CAPTURE(rank);
    CHECK_THAT(seen[rank].error, ContainsText("boom on rank 1 alone"));
    CHECK(seen[rank].seconds < 20);
  }
}

TEST_CASE("two wrappers of a group count for themselves", "[ranks][forwards]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    ForwardCount first(monitor_of(self.group)), second(monitor_of(self.group));
    if (self.rank == 0) first.begin();
    begin_and_fail(second, "boom everywhere");
    if (self.rank == 1) first.begin();
    // Pipeline stages with several parts run their forward passes in orders of their own.
    for (int i = 0; i < 3; ++i) (self.rank == 0 ? first : second).begin();
    if (self.rank == 1) std::this_thread::sleep_for(kLate);
    sum_ones(self);
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("a count begins anew after an averaged pass", "[ranks][errors][forwards]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    ForwardCount count(monitor_of(self.group));
    // In a join, ranks may begin different numbers of passes before an averaged one.
    for (int i = 0; i < 1 + self.rank; ++i) count.begin();
    TORCH_CHECK(count.since_restart() == 1u + self.rank);
    count.restart();
    TORCH_CHECK(count.since_restart() == 0);
    begin_and_fail(count, "boom everywhere");
    if (self.rank == 1) std::this_thread::sleep_for(kLate);
    sum_ones(self);
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("no forward pass that threw is lost, in whatever order they are recorded", "[forwards]") {
  c10d::HashStore store;
  std::vector<FailedForward> known;
  read_failed_forwards(store, 3, known);
  CHECK(known.empty());
  record_failed_forward(store, 3, {1, 2, "boom: two\nlines"});
  record_failed_forward(store, 4, {1, 2, "another wrapper"});
  read_failed_forwards(store, 3, known);
  CHECK(reasons_of(known) == std::vector<std::string>{"1/2 boom: two\nlines"});
  record_failed_forward(store, 3, {0, 1, "late"});
  read_failed_forwards(store, 3, known);
  CHECK(reasons_of(known) == std::vector<std::string>{"1/2 boom: two\nlines", "0/1 late"});
}

TEST_CASE("a forward pass that throws on many ranks is read once", "[forwards]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (int rank = 0; rank < 64; ++rank) record_failed_forward(*store, 0, {rank, 1, "everywhere"});
  int asked = 0;
  WatchedStore counting(store, [&](const std::string&) { ++asked; });
  std::vector<FailedForward> known;
  read_failed_forwards(counting, 0, known);
  CHECK(reasons_of(known) == std::vector<std::string>{"0/1 everywhere"});
  CHECK(asked == 4);
  read_failed_forwards(counting, 0, known);
  CHECK(known.size() == 1);
  CHECK(asked == 6);
}

TEST_CASE("a plain store keeps one entry for a forward pass", "[forwards]") {
  PlainStore store;
  for (int rank = 0; rank < 3; ++rank) record_failed_forward(store, 0, {rank, 1, "everywhere"});
  std::vector<FailedForward> known;
  read_failed_forwards(store, 0, known);
  CHECK(reasons_of(known) == std::vector<std::string>{"0/1 everywhere"});
}

}  // namespace ddp
