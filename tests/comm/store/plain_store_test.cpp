// Stores of a user's own class, which only implement the pure virtual functions of c10d::Store:
// some calls work, others are clear errors.
#include <chrono>
#include <future>
#include <string>
#include <vector>

#include <ddp/collectives.h>
#include <ddp/internal/group_monitor.h>

#include "comm/monitor/failure_records.h"
#include "comm/plain_store.h"
#include "support/error_of.h"
#include "support/recording_backend.h"

#include "support/catch.h"

using namespace std::chrono_literals;
using namespace ddp::testing;

TEST_CASE("a plain store keeps the first failure", "[comm]") {
  PlainStore store;
  CHECK_FALSE(ddp::read_failure(store));
  CHECK(ddp::record_failure(store, "first") == "first");
  CHECK(ddp::record_failure(store, "second") == "first");
  CHECK(ddp::read_failure(store) == "first");
}

TEST_CASE("over a plain store a group's ranks throw a failure", "[comm][errors]") {
  const auto store = c10::make_intrusive<PlainStore>();
  Events events;
  std::vector<ddp::ProcessGroup> groups;
  for (int rank = 0; rank < 2; ++rank) {
    groups.push_back(group_over(c10::make_intrusive<RecordingBackend>(rank, 2, events), store));
  }
  const auto waiting = ddp::monitor_of(groups[0]);
  const auto failing = ddp::monitor_of(groups[1]);
  failing->fail("rank 1 is out of memory");
  CHECK_THAT(
      error_of([&] { waiting->poll([] { return false; }, [] { return std::string("waiting"); }); }),
      ContainsText("rank 1 is out of memory"));
}

TEST_CASE("every rank refuses to connect through a plain store", "[comm][errors]") {
  const auto store = c10::make_intrusive<PlainStore>();
  const auto error_of_rank = [&](int rank) {
    return error_of([&] {
      ddp::make_process_group(
          ddp::ProcessGroupOptions().backend("gloo").store(store).rank(rank).world_size(2).timeout(
              20s));
    });
  };
  auto second = std::async(std::launch::async, [&] { return error_of_rank(1); });
  const auto errors = std::vector<std::string>{error_of_rank(0), second.get()};
  for (int rank = 0; rank < 2; ++rank) {
    CHECK_THAT(
        errors[static_cast<size_t>(rank)],
        Catch::Matchers::Equals(
            "init_process_group: expected a store that implements compareSet, got one that does "
            "not on rank " +
            std::to_string(rank) +
            " of 2. Use a TCPStore, FileStore or HashStore, or override compareSet in a class of "
            "your own."));
  }
}
