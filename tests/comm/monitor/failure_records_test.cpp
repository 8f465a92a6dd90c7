// The records of failures in a group's store.

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/monitor/failure_records.h"

#include "support/catch.h"

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
