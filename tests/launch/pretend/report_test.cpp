#include "launch/pretend/report.h"

#include <string>
#include <vector>

#include "launch/pretend/written_calls.h"

#include "support/catch.h"

using namespace ddp::launch;
using namespace ddp::testing;

namespace {

CallList list_of(int rank, int64_t bytes = 4096) {
  WrittenCalls calls(rank, 16);
  std::vector<int> all;
  for (int i = 0; i < 16; ++i) all.push_back(i);
  const int group = calls.group("default_pg", "world", all);
  calls.step();
  calls.call_and_wait(group, "all_reduce", bytes, "bucket 0");
  calls.call_and_wait(group, "all_reduce", 64, "bucket 1");
  calls.call_and_wait(group, "all_gather", 8, "losses");
  calls.step();
  calls.put("memory\tparameters\t2097152\t2097152");
  calls.put("memory\tactivations\t4194304\t1048576");
  calls.put("peak\t3145728");
  calls.put("process\t104857600");
  return calls.list();
}

constexpr Links kFast{1e9, 1e9, 0};

}  // namespace

TEST_CASE("the report of one rank is an object", "[pure]") {
  CHECK(
      json_of(make_report({list_of(5)}, kFast)) ==
      "{\"world_size\": 16, \"rank\": 5, \"step\": 0, \"peak_bytes\": {\"activations\": 4194304, "
      "\"parameters\": 2097152}, \"bytes_at_peak\": {\"activations\": 1048576, \"parameters\": "
      "2097152}, \"total_peak_bytes\": 3145728, \"process_bytes\": 104857600, \"collectives\": "
      "[{\"axis\": \"world\", \"kind\": \"all_gather\", \"ranks\": 16, \"calls\": 1, \"bytes\": "
      "8}, {\"axis\": \"world\", \"kind\": \"all_reduce\", \"ranks\": 16, \"calls\": 2, "
      "\"bytes\": 4160}], \"compute_ms\": 0.03, \"step_ms\": 0.038, \"chain\": {\"calls\": 3, "
      "\"messages\": 75}, \"faults\": []}\n");
}

TEST_CASE("the report of several ranks has an object of each", "[pure]") {
  const auto json = json_of(make_report({list_of(0), list_of(5)}, std::nullopt));
  CHECK_THAT(
      json, Catch::Matchers::StartsWith("{\"world_size\": 16, \"ranks\": [\n  {\"rank\": 0,"));
  CHECK_THAT(
      json, ContainsText("\n  {\"rank\": 5,") && ContainsText("], \"chain\": {\"calls\": 3,"));
  CHECK_THAT(json, !ContainsText("step_ms"));  // without links
}

TEST_CASE("a fault is in the report, with what it is about", "[pure]") {
  const auto report = make_report({list_of(0), list_of(5), list_of(6, 8)}, std::nullopt);
  const auto json = json_of(report);
  CHECK_THAT(
      json,
      ContainsText(
          "\"faults\": [{\"kind\": \"other_size\", \"ranks\": [6], \"group\": "
          "\"default_pg\", \"place\": \"bucket 0\", \"step\": 0, \"text\": \"process group "));
  CHECK_THAT(
      text_of(report),
      ContainsText("order: process group \"default_pg\" (world, ranks 0-15): expected"));
  CHECK_THAT(
      json_of_failed(report, 3),
      Catch::Matchers::StartsWith("{\"exit_code\": 3, \"faults\": [{\"kind\""));
}

TEST_CASE("the report is a table", "[pure]") {
  CHECK(
      text_of(make_report({list_of(5)}, kFast)) ==
      "rank 5 of 16, step 0\n"
      "  memory        own peak  at the peak of all\n"
      "  activations    4.0 MiB             1.0 MiB\n"
      "  parameters     2.0 MiB             2.0 MiB\n"
      "  all tensors                        3.0 MiB\n"
      "  the process  100.0 MiB\n"
      "  axis   kind        ranks  calls  bytes\n"
      "  world  all_gather     16      1      8\n"
      "  world  all_reduce     16      2   4160\n"
      "  computation 0.03 ms, the step with its calls 0.038 ms\n"
      "the longest chain of calls of the step that depend on each other: 3, with 75 messages one "
      "after the other\n");
  const auto several = text_of(make_report({list_of(0), list_of(5)}, std::nullopt));
  CHECK_THAT(several, ContainsText("the calls of ranks 0, 5 of 16 meet, in one order\n"));
}

TEST_CASE("a rank that failed is named, and no call is missing after its end", "[pure]") {
  std::vector<CallList> lists;
  for (const int rank : {0, 1}) {
    WrittenCalls calls(rank, 2);
    const int group = calls.group("default_pg", "world", {0, 1});
    calls.call_and_wait(group, "barrier", 0);
    if (rank == 0) calls.call_and_wait(group, "barrier", 0);
    auto text = calls.file();
    if (rank == 1) text.replace(text.rfind("ok"), 2, "exit status 1");
    lists.push_back(parse_call_list("list", text));
  }
  const auto report = make_report(lists, std::nullopt);
  CHECK(report.faults.empty());
  CHECK_THAT(text_of(report), ContainsText("; it ended by: exit status 1\n"));
  CHECK_THAT(
      json_of(report),
      ContainsText("\"ended_by\": \"exit status 1\"") && !ContainsText("\"ended_by\": \"ok\""));
}

TEST_CASE("a step that cannot end has no time", "[pure]") {
  std::vector<CallList> lists;
  for (const int rank : {0, 1}) {
    WrittenCalls calls(rank, 2);
    const int group = calls.group("default_pg", "world", {0, 1});
    if (rank == 0) calls.call_and_wait(group, "barrier", 0);
    lists.push_back(calls.list());
  }
  const auto report = make_report(lists, kFast);
  CHECK_FALSE(report.step_seconds);
  CHECK(report.faults.size() == 1);
}

TEST_CASE("many faults are said in few lines", "[pure]") {
  const std::vector<OrderFault> faults(
      23, OrderFault{OrderFault::Kind::OtherSize, {}, "", "", 0, "x"});
  const auto lines = lines_of_faults(faults);
  CHECK(lines.size() == 21);
  CHECK(lines.back() == "order: and 3 more; --json has all");
}
