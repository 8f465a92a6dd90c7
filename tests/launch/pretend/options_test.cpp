#include "launch/pretend/options.h"

#include <string>
#include <vector>

#include "launch/environment.h"
#include "launch/parse.h"

#include "support/catch.h"

using namespace ddp::launch;
using ddp::testing::BadLine;
using ddp::testing::Parse;
using Words = std::vector<std::string>;

TEST_CASE("a pretended world has its ranks here", "[pure]") {
  const Parse parse({"--pretend", "1024", "--ranks", "512,0,7,7", "./train", "--rank", "3"});
  REQUIRE(parse.accepted);
  CHECK(parse.err.empty());
  REQUIRE(parse.options.pretended);
  CHECK(parse.options.pretended->size == 1024);
  CHECK(parse.options.pretended->ranks_a_host == 8);
  CHECK(parse.options.pretended->present == std::vector<int>{0, 7, 512});
  CHECK(parse.options.local_ranks == 3);
  CHECK(parse.options.command == Words{"./train", "--rank", "3"});
  CHECK_FALSE(parse.options.calls.links);
  CHECK_FALSE(parse.options.calls.json);
}

TEST_CASE("ranks of a host are -n or --per-host, and no more than the world has", "[pure]") {
  const auto a_host = [](Words words) {
    words.push_back("p");
    return Parse(words).options.pretended->ranks_a_host;
  };
  CHECK(a_host({"--pretend", "64", "--rank", "1", "-n", "4"}) == 4);
  CHECK(a_host({"--pretend", "64", "--rank", "1", "--per-host", "16"}) == 16);
  CHECK(a_host({"--pretend", "2", "--ranks", "all"}) == 2);
}

TEST_CASE("links have rates and a latency", "[pure]") {
  const Parse parse(
      {"--pretend", "16", "--rank", "0", "--link", "50GB/s", "--intra", "3200Gbit/s", "--latency",
       "2.5us", "--json", "--calls", "/tmp/lists", "p"});
  REQUIRE(parse.accepted);
  REQUIRE(parse.options.calls.links);
  CHECK(parse.options.calls.links->network_rate == Approx(50e9));
  CHECK(parse.options.calls.links->host_rate == Approx(400e9));
  CHECK(parse.options.calls.links->latency == Approx(2.5e-6));
  CHECK(parse.options.calls.json);
  CHECK(parse.options.calls.folder == "/tmp/lists");
  const Parse one({"--pretend", "16", "--rank", "0", "--link", "1MB/s", "p"});
  CHECK(one.options.calls.links->host_rate == Approx(1e6));
  CHECK(one.options.calls.links->latency == Approx(5e-6));
  CHECK(parse_duration("800ns") == Approx(8e-7));
  CHECK(parse_duration("0.1ms") == Approx(1e-4));
  CHECK(parse_duration("1s") == Approx(1));
  CHECK(parse_rate("8B/s") == Approx(8));
  CHECK(parse_rate("8KB/s") == Approx(8e3));
  CHECK(parse_rate("8TB/s") == Approx(8e12));
  CHECK(parse_rate("8Mbit/s") == Approx(1e6));
}

TEST_CASE("lists are checked without a program", "[pure]") {
  const Parse parse({"--check", "lists", "--link", "1GB/s"});
  REQUIRE(parse.accepted);
  CHECK(parse.options.calls.check == "lists");
  CHECK(parse.options.command.empty());
  CHECK(parse.options.calls.links);
}

TEST_CASE("a real job writes lists to a folder that is the same from each folder", "[pure]") {
  const Parse parse({"-n", "2", "--calls", "lists", "p"});
  REQUIRE(parse.accepted);
  CHECK_THAT(
      parse.options.calls.folder,
      Catch::Matchers::StartsWith("/") && Catch::Matchers::EndsWith("/lists"));
  CHECK_FALSE(parse.options.pretended);
}

TEST_CASE("variables of an engine say nothing of a pretended world", "[pure]") {
  const Parse parse(
      {"--pretend", "16", "--rank", "3", "p"}, {{"PET_NNODES", "2"},
                                                {"PET_NPROC_PER_NODE", "3"},
                                                {"SLURM_NTASKS", "2"},
                                                {"SLURM_PROCID", "0"}});
  CAPTURE(parse.err);
  REQUIRE(parse.accepted);
  CHECK(parse.err.empty());
  CHECK(parse.options.nodes == 1);
  CHECK(parse.options.local_ranks == 1);
}

TEST_CASE("a bad command line of a pretended world names option, rule and value", "[pure]") {
  const std::vector<BadLine> cases = {
      {{"--pretend", "0", "--rank", "0", "p"}, {"--pretend", "from 1 to 1048576", "'0'"}},
      {{"--pretend", "8", "p"}, {"--pretend: expected --ranks beside it"}},
      {{"--pretend", "8", "--rank", "8", "p"}, {"--ranks: expected all, or ranks below 8", "'8'"}},
      {{"--pretend", "8", "--ranks", "1;2", "p"}, {"--ranks", "'1;2'"}},
      {{"--pretend", "8", "--ranks", "", "p"}, {"--ranks"}},
      {{"--pretend", "4096", "--ranks", "all", "p"},
       {"--ranks: expected no more than 1024", "4096"}},
      {{"--pretend", "8", "--rank", "0"}, {"expected a program"}},
      {{"--pretend", "8", "--rank", "0", "-n", "2", "--per-host", "2", "p"}, {"--per-host", "-n"}},
      {{"--pretend", "8", "--rank", "0", "-n", "auto", "p"}, {"--nproc-per-node", "'auto'"}},
      {{"--pretend", "8", "--rank", "0", "--nnodes", "2", "p"}, {"--nnodes"}},
      {{"--pretend", "8", "--rank", "0", "--max-restarts", "2", "p"},
       {"--max-restarts: expected no --pretend beside it"}},
      {{"--pretend", "8", "--rank", "0", "--elastic", "p"}, {"--elastic: expected no --pretend"}},
      {{"--pretend", "8", "--rank", "0", "-H", "a,b", "p"}, {"expected no --pretend"}},
      {{"--pretend", "8", "--rank", "0", "--link", "50", "p"}, {"--link", "50GB/s", "'50'"}},
      {{"--pretend", "8", "--rank", "0", "--link", "0GB/s", "p"}, {"--link", "'0GB/s'"}},
      {{"--pretend", "8", "--rank", "0", "--link", "-1GB/s", "p"}, {"--link", "'-1GB/s'"}},
      {{"--pretend", "8", "--rank", "0", "--link", "1.2.3GB/s", "p"}, {"--link", "'1.2.3GB/s'"}},
      {{"--pretend", "8", "--rank", "0", "--link", "1GB/s", "--latency", "5", "p"},
       {"--latency", "5us", "'5'"}},
      {{"--pretend", "8", "--rank", "0", "--intra", "1GB/s", "p"}, {"--intra: expected --link"}},
      {{"--pretend", "8", "--rank", "0", "--json", "--no-prefix", "p"}, {"--json", "--no-prefix"}},
      {{"-n", "2", "--json", "p"}, {"--json: expected --pretend or --check beside it"}},
      {{"-n", "2", "--rank", "0", "p"}, {"--ranks: expected --pretend beside it"}},
      {{"-n", "2", "--per-host", "2", "p"}, {"--per-host: expected --pretend beside it"}},
      {{"-H", "a", "--calls", "f", "p"}, {"DDP_CALLS_DIR"}},
      {{"--check", "f", "p"}, {"--check: expected no --pretend, --calls or program"}},
      {{"--check", "f", "--pretend", "8", "--rank", "0"}, {"--check"}},
      {{"--check", ""}, {"--check"}},
  };
  for (const BadLine& bad : cases) {
    const Parse parse(bad.words);
    CAPTURE(bad.words, parse.err);
    CHECK_FALSE(parse.accepted);
    CHECK(parse.exit_code == kBadUsage);
    for (const auto& text : bad.said) CHECK_THAT(parse.err, ContainsText(text));
  }
}

TEST_CASE("--help has the options of pretended worlds", "[pure]") {
  const Parse help({"--help"});
  for (const char* text :
       {"--pretend", "--ranks", "--per-host", "--link", "--intra", "--latency", "--calls",
        "--check", "--json", "pretended worlds"}) {
    CHECK_THAT(help.out, ContainsText(text));
  }
}

TEST_CASE("a pretended rank finds its place in the whole world", "[pure]") {
  LaunchOptions options;
  options.pretended = PretendedWorld{20, 8, {0, 9, 19}};
  options.local_ranks = 3;
  options.calls.folder = "/lists";
  const auto of = [&](int local_rank) {
    const Environment inherited{"DDP_PRETEND=4", "DDP_CALLS_DIR=/old", "KEPT=1"};
    return ddp::joined_by(" ", rank_environment(inherited, options, {0, 29500}, local_rank, "1"));
  };
  CHECK_THAT(
      of(1), ContainsText("KEPT=1 RANK=9 WORLD_SIZE=20 LOCAL_RANK=1 LOCAL_WORLD_SIZE=8 "
                          "GROUP_RANK=1 GROUP_WORLD_SIZE=3 ") &&
                 ContainsText("DDP_PRETEND=0,9,19") && ContainsText("DDP_CALLS_DIR=/lists") &&
                 !ContainsText("/old") && !ContainsText("DDP_PRETEND=4"));
  CHECK_THAT(
      of(2), ContainsText("RANK=19 WORLD_SIZE=20 LOCAL_RANK=3 LOCAL_WORLD_SIZE=4 GROUP_RANK=2"));
  // The ranks of a real job are not pretended because the one around it was.
  LaunchOptions real;
  real.local_ranks = 2;
  const Environment inherited{"DDP_PRETEND=4", "DDP_CALLS_DIR=/old"};
  const auto text = ddp::joined_by(" ", rank_environment(inherited, real, {0, 1}, 0, "1"));
  CHECK_THAT(text, !ContainsText("DDP_PRETEND") && ContainsText("DDP_CALLS_DIR=/old"));
}
