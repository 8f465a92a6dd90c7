#include "launch/pretend/call_list.h"

#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "launch/pretend/written_calls.h"

#include "support/catch.h"
#include "support/temporary_folder.h"

using namespace ddp::launch;
using namespace ddp::testing;

namespace {

const std::string kBegin = "ddp-calls\t1\nrank\t7\t1024\t8\ngroup\t0\tpg\tworld\t0-1023\n";

}  // namespace

TEST_CASE("a list has groups, calls, waits, steps and memory", "[pure]") {
  const auto list = parse_call_list(
      "f", kBegin +
               "group\t4\tmesh\tdp\t7-1023:8\n"
               "call\t12\t100\t4\tbroadcast\tfloat\t4096\t3\tbucket 3\n"
               "step\t150\t0\n"
               "call\t13\t250\t0\tbarrier\t-\t0\t-1\t\n"
               "wait\t251\t12\n"
               "later\tfields\n"
               "memory\tgradients\t20\t10\npeak\t33\nprocess\t44\nend\t300\tok\n");
  CHECK(list.rank == 7);
  CHECK(list.world_size == 1024);
  CHECK(list.ranks_a_host == 8);
  REQUIRE(list.groups.size() == 2);
  CHECK(list.groups[1].axis == "dp");
  CHECK(list.groups[1].ranks.size() == 128);
  REQUIRE(list.calls.size() == 2);
  CHECK(list.calls[0].number == 12);
  CHECK(list.calls[0].group == 1);
  CHECK(list.calls[0].kind == "broadcast");
  CHECK(list.calls[0].dtype == "float");
  CHECK(list.calls[0].bytes == 4096);
  CHECK(list.calls[0].peer == 3);
  CHECK(list.calls[0].place == "bucket 3");
  CHECK(list.calls[0].step == -1);
  CHECK(list.calls[1].step == 0);
  REQUIRE(list.events.size() == 5);
  CHECK(list.events[2].computing == Approx(100e-6));
  CHECK(list.events[3].kind == ListedEvent::Kind::Wait);
  CHECK(list.events[3].index == 0);
  CHECK(list.memory.at("gradients").peak == 20);
  CHECK(list.memory.at("gradients").at_peak == 10);
  CHECK(list.peak == 33);
  CHECK(list.process_peak == 44);
  CHECK(list.is_complete);
}

TEST_CASE("time that the process waited for others is no computation", "[pure]") {
  const auto list = parse_call_list(
      "f", kBegin +
               "step\t100\t0\n"
               "pause\t90\t120\npause\t110\t130\n"  // the first 10 are of the event before
               "step\t200\t1\nstep\t210\t2\n");
  REQUIRE(list.events.size() == 3);
  CHECK(list.events[1].computing == Approx(70e-6));
  CHECK(list.events[2].computing == Approx(10e-6));
}

TEST_CASE("a thread may call while another one waits", "[pure]") {
  // The pause has its line at its end.
  const auto list = parse_call_list(
      "f", kBegin +
               "step\t100\t0\n"
               "call\t1\t150\t0\tbarrier\t-\t0\t-1\t\n"
               "call\t2\t180\t0\tbarrier\t-\t0\t-1\t\n"
               "pause\t110\t190\n"
               "wait\t195\t1\npause\t300\t200\nend\t400\tok\n");
  REQUIRE(list.events.size() == 5);
  CHECK(list.events[1].computing == Approx(10e-6));
  CHECK(list.events[2].computing == 0);
  CHECK(list.events[3].computing == Approx(5e-6));
  CHECK(list.events[4].computing == Approx(205e-6));  // a pause that ends before it begins is none
}

TEST_CASE("a list may be broken off, or say by what the program ended", "[pure]") {
  const auto cut = parse_call_list("f", kBegin + "call\t0\t5\t0\tbarrier\t-\t0\t-1\t\ncall\t1\t");
  CHECK(cut.calls.size() == 1);
  CHECK_FALSE(cut.is_complete);
  const auto failed = parse_call_list("f", kBegin + "end\t5\tout of memory\n");
  CHECK_FALSE(failed.is_complete);
  CHECK(failed.error == "out of memory");
}

TEST_CASE("a line that is not as expected is named with file, rule and value", "[pure]") {
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"", "f:1: expected ddp-calls 1 in the first line, got nothing"},
      {"rank\t0\t1\t1\n", "f:1: expected ddp-calls 1 in the first line, got 'rank"},
      {"ddp-calls\t2\n", "f:1: expected version 1, which this ddprun reads, got 2"},
      {"ddp-calls\t1\nrank\t8\t8\t1\n", "f:2: expected no more than 7 in field 2, got 8"},
      {"ddp-calls\t1\nrank\t0\n", "f:2: expected 4 fields of a line rank, got 2"},
      {kBegin + "group\t1\tx\tdp\t0-1024\n", "f:4: expected ranks below the world size, 1024"},
      {kBegin + "group\t1\tx\tdp\t0-6\n", "f:4: expected a group with rank 7, got '0-6'"},
      {kBegin + "call\t0\t1\t5\tbarrier\t-\t0\t-1\t\n",
       "expected a group that a line before has, got 5"},
      {kBegin + "call\t0\tx\t0\tbarrier\t-\t0\t-1\t\n",
       "expected a whole number from 0 in field 3, got 'x'"},
      {kBegin + "call\t0\t1\t0\tbarrier\t-\t-4\t-1\t\n",
       "expected a whole number from 0 in field 7, got '-4'"},
      {kBegin + "call\t0\t1\t0\tbroadcast\t-\t4\t1024\t\n",
       "expected a rank of the group's 1024, got 1024"},
      {kBegin + "wait\t1\t3\n", "f:4: expected the number of a call before it, got 3"},
      {kBegin + "ddp-calls\t1\n", "f:4: expected it there only, got 'ddp-calls\t1'"},
  };
  for (const auto& [text, said] : bad) {
    CHECK_THROWS_WITH(parse_call_list("f", text), ContainsText(said));
  }
}

TEST_CASE("the lists of a folder are of one world", "[pure]") {
  const TemporaryFolder folder;
  const auto write = [&](const std::string& name, const std::string& text) {
    std::ofstream(folder.path() + "/" + name) << text;
  };
  CHECK_THROWS_WITH(
      read_call_lists(folder.path(), {}), ContainsText("expected rank_0.calls or other lists in"));
  CHECK_THROWS_WITH(read_call_lists(folder.path() + "/none", {}), ContainsText("No such file"));
  write("rank_10.calls", WrittenCalls(10, 16).file());
  write("rank_9.calls", WrittenCalls(9, 16).file());
  write("rank_x.calls", "no list");
  write("rank_1.calls.old", "no list");
  const auto lists = read_call_lists(folder.path(), {});
  REQUIRE(lists.size() == 2);
  CHECK(lists[0].rank == 9);
  CHECK(lists[1].rank == 10);
  CHECK_THROWS_WITH(
      read_call_lists(folder.path(), {9, 11}),
      ContainsText("rank_11.calls: expected a list of calls, got No such file"));
  write("rank_11.calls", WrittenCalls(11, 32).file());
  CHECK_THROWS_WITH(
      read_call_lists(folder.path(), {}),
      ContainsText(
          "rank_11.calls: expected rank 11 of 16, as rank_9.calls has it, got rank 11 of 32"));
  write("rank_11.calls", WrittenCalls(12, 16).file());
  CHECK_THROWS_WITH(read_call_lists(folder.path(), {}), ContainsText("got rank 12 of 16"));
}
