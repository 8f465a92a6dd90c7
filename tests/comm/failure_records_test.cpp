// The records of failures in a group's store.
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/monitor/failure_records.h"
#include "comm/watched_store.h"

#include "support/catch.h"

using ddp::FailedAttempt;
using ddp::read_attempts;
using ddp::record_attempt;

namespace {

std::vector<std::string> reasons(const std::vector<FailedAttempt>& attempts) {
  std::vector<std::string> texts;
  for (const auto& attempt : attempts) {
    texts.push_back(
        std::to_string(attempt.rank) + "/" + std::to_string(attempt.number) + " " + attempt.why);
  }
  return texts;
}

}  // namespace

TEST_CASE("the first failure is kept", "[comm]") {
  c10d::HashStore store;
  CHECK_FALSE(ddp::read_failure(store));
  CHECK(ddp::record_failure(store, "first") == "first");
  CHECK(ddp::record_failure(store, "second") == "first");
  CHECK(ddp::read_failure(store) == "first");
}

TEST_CASE("the ranks that have read the failure are recorded", "[comm]") {
  c10d::HashStore store;
  CHECK(ddp::have_read(store, {}));
  ddp::record_reader(store, 0);
  ddp::record_reader(store, 2);
  CHECK(ddp::have_read(store, {0, 2}));
  CHECK_FALSE(ddp::have_read(store, {0, 1, 2}));
}

TEST_CASE("no attempt that failed is lost, in whatever order they are recorded", "[comm]") {
  c10d::HashStore store;
  std::vector<FailedAttempt> known;
  read_attempts(store, known);
  CHECK(known.empty());
  record_attempt(store, {1, 2, "group 1", "boom: two\nlines"});
  read_attempts(store, known);
  CHECK(reasons(known) == std::vector<std::string>{"1/2 boom: two\nlines"});
  record_attempt(store, {0, 1, "", "late"});
  read_attempts(store, known);
  CHECK(reasons(known) == std::vector<std::string>{"1/2 boom: two\nlines", "0/1 late"});
}

TEST_CASE("an attempt that fails on many ranks is read once", "[comm]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (int rank = 0; rank < 64; ++rank) record_attempt(*store, {rank, 1, "", "everywhere"});
  int asked = 0;
  ddp::testing::WatchedStore counting(store, [&](const std::string&) { ++asked; });
  std::vector<FailedAttempt> known;
  read_attempts(counting, known);
  CHECK(reasons(known) == std::vector<std::string>{"0/1 everywhere"});
  CHECK(asked == 4);
  read_attempts(counting, known);
  CHECK(known.size() == 1);
  CHECK(asked == 6);
}
