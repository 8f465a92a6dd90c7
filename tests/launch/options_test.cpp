#include "launch/options.h"

#include <chrono>
#include <string>
#include <vector>

#include "launch/parse.h"

#include "support/catch.h"

using ddp::launch::kBadUsage;
using ddp::testing::BadLine;
using ddp::testing::Parse;
using Words = std::vector<std::string>;

TEST_CASE("the program begins at the first word that is not an option", "[pure]") {
  const Words expected = {"./train", "-n", "3", "--help", "--", "x"};
  CHECK(Parse({"-n", "2", "./train", "-n", "3", "--help", "--", "x"}).options.command == expected);
  CHECK(
      Parse({"-n", "2", "--", "./train", "-n", "3", "--help", "--", "x"}).options.command ==
      expected);
  CHECK(Parse({"-n", "2", "--", "--odd-name"}).options.command == Words{"--odd-name"});
}

TEST_CASE("one host is the default, standalone or not", "[pure]") {
  for (const Words& words :
       {Words{"-n", "2", "p"}, Words{"--standalone", "-n2", "p"},
        Words{"--nproc-per-node=2", "--standalone", "p"},
        Words{"--standalone", "--nnodes=1", "--nproc-per-node=2", "p"},
        Words{"--standalone", "--nnodes", "1", "--node-rank", "0", "-n", "2", "p"}}) {
    const Parse parse(words);
    REQUIRE(parse.accepted);
    CHECK(parse.options.local_ranks == 2);
    CHECK(parse.options.nodes == 1);
    CHECK(parse.options.node_rank == 0);
    CHECK(parse.options.master_addr == "127.0.0.1");
    CHECK(parse.options.master_port == 0);
    CHECK_FALSE(parse.options.omp_threads.has_value());
    CHECK_FALSE(parse.options.grace.has_value());
    CHECK(parse.options.prefix);
  }
}

TEST_CASE("every option reaches LaunchOptions", "[pure]") {
  const Parse parse(
      {"-n", "8", "--nnodes", "3", "--node-rank", "2", "--master-addr", "host0", "--master-port",
       "29500", "--omp-threads", "4", "--grace", "0.25", "--no-prefix", "p"});
  REQUIRE(parse.accepted);
  CHECK(parse.options.local_ranks == 8);
  CHECK(parse.options.nodes == 3);
  CHECK(parse.options.node_rank == 2);
  CHECK(parse.options.master_addr == "host0");
  CHECK(parse.options.master_port == 29500);
  CHECK(parse.options.omp_threads == 4);
  CHECK(parse.options.grace == std::chrono::milliseconds(250));
  CHECK_FALSE(parse.options.prefix);
}

TEST_CASE("a bad command line is refused with code 2 and says what was expected", "[pure]") {
  const std::vector<BadLine> cases = {
      {{}, {"--nproc-per-node", "required"}},
      {{"p"}, {"--nproc-per-node", "required"}},
      {{"-n"}, {"--nproc-per-node", "missing"}},
      {{"-n", "0", "p"}, {"whole number from 1 to 1024", "'0'"}},
      {{"-n", "-2", "p"}, {"whole number from 1 to 1024", "'-2'"}},
      {{"-n", "+2", "p"}, {"whole number from 1 to 1024", "'+2'"}},
      {{"-n", "two", "p"}, {"whole number from 1 to 1024", "'two'"}},
      {{"-n", "2.5", "p"}, {"whole number from 1 to 1024", "'2.5'"}},
      {{"-n", "", "p"}, {"--nproc-per-node"}},
      {{"-n", "1025", "p"}, {"whole number from 1 to 1024", "'1025'"}},
      {{"-n", "99999999999999999999", "p"}, {"whole number", "'99999999999999999999'"}},
      {{"-n", "2", "-n", "3", "p"}, {"--nproc-per-node"}},
      {{"-n", "2"}, {"expected a program"}},
      {{"-n", "2", "--"}, {"expected a program"}},
      {{"-n", "2", ""}, {"program's name"}},
      {{"-n", "2", "--frobnicate", "p"}, {"unknown option '--frobnicate'"}},
      {{"-n", "2", "--nnodes", "2", "p"},
       {"--rdzv-endpoint, the same on every host", "--master-addr and --master-port"}},
      {{"-n", "2", "--nnodes", "2", "--master-addr", "h", "p"}, {"--master-port"}},
      {{"-n", "2", "--rdzv-endpoint", "h", "p"}, {"--rdzv-endpoint", "HOST:PORT", "'h'"}},
      {{"-n", "2", "--rdzv-endpoint", ":1", "p"}, {"--rdzv-endpoint", "HOST:PORT"}},
      {{"-n", "2", "--rdzv-endpoint", "h:0", "p"}, {"--rdzv-endpoint", "1 to 65535"}},
      {{"-n", "2", "--rdzv-endpoint", "h:1", "--master-port", "2", "p"},
       {"--rdzv-endpoint", "replaces"}},
      {{"-n", "2", "--standalone", "--rdzv-endpoint", "h:1", "p"},
       {"--standalone", "--rdzv-endpoint"}},
      {{"-n", "2", "--max-restarts", "-1", "p"}, {"--max-restarts", "'-1'"}},
      {{"-n", "2", "--nnodes", "2", "--max-restarts", "1", "p"}, {"--rdzv-endpoint"}},
      {{"-n", "2", "--log-dir", "", "p"}, {"--log-dir", "expected a folder"}},
      {{"-n", "2", "--no-prefix", "--log-dir", "x", "p"}, {"--log-dir", "--no-prefix"}},
      {{"-n", "2", "--nnodes", "0", "p"}, {"--nnodes", "'0'"}},
      {{"-n", "2", "--node-rank", "1", "p"}, {"--node-rank", "less than --nnodes (1)", "got 1"}},
      {{"-n", "2", "--master-addr", "", "p"}, {"--master-addr"}},
      {{"-n", "2", "--master-port", "65536", "p"}, {"--master-port", "65535", "'65536'"}},
      {{"-n", "2", "--standalone", "--nnodes", "2", "p"}, {"--standalone", "--nnodes"}},
      {{"-n", "2", "--standalone", "--master-port", "1", "p"}, {"--standalone", "--master-port"}},
      {{"-n", "2", "--omp-threads", "0", "p"}, {"--omp-threads", "'0'"}},
      {{"-n", "2", "--grace", "-1", "p"}, {"--grace", "'-1'"}},
      {{"-n", "2", "--grace", "soon", "p"}, {"--grace", "'soon'"}},
      {{"-n", "2", "--grace", "nan", "p"}, {"--grace", "'nan'"}},
  };
  for (const BadLine& bad : cases) {
    const Parse parse(bad.words);
    CAPTURE(bad.words, parse.err);
    CHECK_FALSE(parse.accepted);
    CHECK(parse.exit_code == kBadUsage);
    CHECK(parse.out.empty());
    CHECK_THAT(parse.err, Catch::Matchers::StartsWith("ddprun: ") && ContainsText("--help"));
    for (const auto& text : bad.said) CHECK_THAT(parse.err, ContainsText(text));
  }
}

TEST_CASE("--help lists every option and --version prints the version", "[pure]") {
  const Parse help({"--help"});
  CHECK_FALSE(help.accepted);
  CHECK(help.exit_code == 0);
  CHECK(help.err.empty());
  for (const char* text :
       {"Usage: ddprun -n RANKS", "--standalone", "--nnodes", "--node-rank", "--master-addr",
        "--master-port", "--omp-threads", "--grace", "--no-prefix", "--max-restarts", "--log-dir",
        "--rdzv-endpoint", "--hostfile", "--rdzv-backend", "ddprun -n 2 ./train"}) {
    CHECK_THAT(help.out, ContainsText(text));
  }
  const Parse version({"--version"});
  CHECK(version.exit_code == 0);
  CHECK_THAT(version.out, Catch::Matchers::StartsWith("ddprun ") && ContainsText("."));
}
