// The record of a process's latest collectives.
#include <cstdlib>
#include <fstream>
#include <sstream>

#include <ATen/ATen.h>
#include <ddp/collectives.h>
#include <ddp/device_mesh.h>
#include <ddp/flight_record.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/groups.h>

#include "comm/monitor/flight_record.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

}  // namespace

TEST_CASE("a flight record has the latest calls of each group", "[comm][ranks]") {
  const TemporaryFolder folder;
  run_ranks<int>(2, [&](const Rank& self) {
    const auto pair = new_group({0, 1}, self.group);
    auto tensor = at::ones({10});
    all_reduce(tensor, c10d::ReduceOp::SUM, self.group);
    broadcast(tensor, 1, pair);
    barrier(self.group);
    if (self.rank == 0) {
      dump_flight_record(folder.path() + "/record.txt");
      dump_flight_record(folder.path() + "/record.json");
    }
    barrier(self.group);
    return 0;
  });
  const auto text = read_bytes(folder.path() + "/record.txt");
  CHECK_THAT(
      text, ContainsText("process group \"default_pg\", rank 0 of 2\n") &&
                ContainsText("process group \"group [0, 1]\", rank 1 of 2\n") &&
                ContainsText(" cpu 2 all_reduce of 10 x Float, SUM\n") &&
                ContainsText(" cpu 0 broadcast of 10 x Float from rank 1\n") &&
                ContainsText(" cpu 3 barrier\n") && ContainsText("  20"));
  const auto json = read_bytes(folder.path() + "/record.json");
  CHECK_THAT(
      json,
      ContainsText("\"call\": \"all_reduce\", \"dtype\": \"Float\", \"tensors\": 1, \"numel\": 10, "
                   "\"reduction\": \"SUM\", \"root\": null}") &&
          ContainsText("\"call\": \"broadcast\", \"dtype\": \"Float\", \"tensors\": 1, "
                       "\"numel\": 10, \"reduction\": null, \"root\": 1}") &&
          ContainsText("{\"name\": \"default_pg\", \"rank\": 0, \"size\": 2, "
                       "\"coordinate\": null, \"failure\": null"));
}

TEST_CASE("a flight record has collectives that are called on the group itself", "[comm][ranks]") {
  const TemporaryFolder folder;
  run_ranks<int>(2, [&](const Rank& self) {
    auto from = at::ones({2}), to = at::empty({2});
    std::vector<int64_t> sent{1, 1}, received{1, 1};
    self.group->barrier()->wait();
    self.group->DDP_GROUP_ALL_TO_ALL_SINGLE(to, from, received, sent)->wait();
    if (self.rank == 0) dump_flight_record(folder.path() + "/record.txt");
    return 0;
  });
  CHECK_THAT(
      read_bytes(folder.path() + "/record.txt"),
      ContainsText(" cpu 0 barrier\n") && ContainsText(" cpu 1 all_to_all of Float\n"));
}

TEST_CASE("a flight record has the rank's place in a mesh", "[comm][ranks]") {
  const TemporaryFolder folder;
  run_ranks<int>(2, [&](const Rank& self) {
    const auto mesh = init_device_mesh({1, 2}, {"dp", "tp"}, self.group);
    barrier(self.group);
    if (self.rank == 0) {
      dump_flight_record(folder.path() + "/record.txt");
      dump_flight_record(folder.path() + "/record.json");
    }
    barrier(mesh.group("tp"));
    return 0;
  });
  CHECK_THAT(
      read_bytes(folder.path() + "/record.txt"),
      ContainsText("process group \"tp [0, 1]\", rank 1 of 2 (dp 0, tp 1)\n"));
  CHECK_THAT(
      read_bytes(folder.path() + "/record.json"),
      ContainsText("{\"name\": \"tp [0, 1]\", \"rank\": 1, \"size\": 2, "
                   "\"coordinate\": \"dp 0, tp 1\", "));
}

TEST_CASE("a group that fails writes its flight record where asked", "[comm][ranks][errors]") {
  const TemporaryFolder folder;
  ::setenv("DDP_FLIGHT_RECORD", (folder.path() + "/job").c_str(), 1);
  errors_of_ranks(2, [](const Rank& self) {
    auto tensor = at::ones({3});
    all_reduce(tensor, c10d::ReduceOp::SUM, self.group);
    if (self.rank == 1) monitor_of(self.group)->fail("a \"reason\"\n");
    all_reduce(tensor, c10d::ReduceOp::SUM, self.group);
  });
  ::unsetenv("DDP_FLIGHT_RECORD");
  for (const char* file : {"/job.rank0.json", "/job.rank1.json"}) {
    CHECK_THAT(
        read_bytes(folder.path() + file),
        ContainsText("\"failure\": \"a \\\"reason\\\"\\u000a") && ContainsText("all_reduce"));
  }
}

TEST_CASE("a flight record that cannot be written is an error", "[comm][errors][once]") {
  CHECK_THROWS_WITH(
      dump_flight_record("/nowhere/record.json"),
      ContainsText("dump_flight_record: expected to write \"/nowhere/record.json\", but cannot"));
}

}  // namespace ddp
