#include "launch/hosts/remote_command.h"

#include <chrono>
#include <string>
#include <vector>

#include "launch/hosts/hosts_loop.h"
#include "launch/parse.h"

#include "support/catch.h"

using namespace ddp::launch;
using ddp::testing::Parse;
using Words = std::vector<std::string>;

TEST_CASE("a word is quoted for a shell where that would change it", "[pure]") {
  CHECK(quoted("./train") == "./train");
  CHECK(quoted("user@a:1,b=2+3") == "user@a:1,b=2+3");
  CHECK(quoted("") == "''");
  CHECK(quoted("a b") == "'a b'");
  CHECK(quoted("it's") == "'it'\\''s'");
  CHECK(quoted("'") == "''\\'''");
  CHECK(quoted("$HOME `x` \"y\" \\ * ~ ! # & ; |") == "'$HOME `x` \"y\" \\ * ~ ! # & ; |'");
  CHECK(quoted("two\nlines") == "'two\nlines'");
  CHECK(quoted("雪") == "'雪'");
  CHECK(quoted("=cmd") == "'=cmd'");
  CHECK(quoted("~") == "'~'");
}

TEST_CASE(
    "the hosts get the variables of the libraries, and not those of another place", "[pure]") {
  const Environment all = {
      "PATH=/bin",
      "HOME=/root",
      "LD_LIBRARY_PATH=/lib",
      "OMP_NUM_THREADS=2",
      "NCCL_DEBUG=INFO",
      "TORCH_CPP_LOG_LEVEL=INFO",
      "GLOO_SOCKET_IFNAME=eth0",
      "DDP_BACKEND=gloo",
      "DDP_SLOT=3",
      "DDP_COORDINATOR=a:1/t",
      "RANK=1",
      "OWN=x",
      "OWNER=y"};
  CHECK(
      passed_on(all, {"OWN", "ADDED=a b"}) ==
      Environment{
          "PATH=/bin", "LD_LIBRARY_PATH=/lib", "OMP_NUM_THREADS=2", "NCCL_DEBUG=INFO",
          "TORCH_CPP_LOG_LEVEL=INFO", "GLOO_SOCKET_IFNAME=eth0", "DDP_BACKEND=gloo", "OWN=x",
          "ADDED=a b"});
}

TEST_CASE("a host's line has its folder, variables, place and program", "[pure]") {
  const auto arguments = [](const Words& words, int node, int port) {
    Parse parse(words);
    parse.options.job_id = "j";
    return host_arguments(parse.options, node, port);
  };
  CHECK(
      remote_command(
          "/my folder", {"A=b c"}, "/bin/ddprun",
          arguments({"-H", "a:4,b:2", "p", "x y"}, 1, 29500)) ==
      "cd '/my folder' && exec env 'A=b c' /bin/ddprun --obey-stdin -n 4,2 --nnodes 2 --node-rank "
      "1 "
      "--rdzv-endpoint a:29500 -- p 'x y'");
  CHECK(
      arguments(
          {"-H", "[::1]:2", "--max-restarts", "3", "--grace", "0.25", "--omp-threads", "2",
           "--log-dir", "logs", "p"},
          0, 0) == Words{
                       "--obey-stdin", "-n", "2", "--omp-threads", "2", "--grace", "0.25",
                       "--max-restarts", "3", "--log-dir", "logs", "--", "p"});
}

TEST_CASE("a host's ddprun reads the line as it was meant", "[pure]") {
  const Words line = {"-H",          "[fd00::1]:4,b:2",
                      "--elastic",   "--min-ranks",
                      "3",           "--hold",
                      "1.5",         "--wait",
                      "60",          "--lost-after",
                      "20",          "--no-prefix",
                      "--rdzv-id",   "j",
                      "--rdzv-conf", "join_timeout=50",
                      "--",          "--odd",
                      "-np"};
  const auto whole = Parse(line).options;
  const Parse parse(host_arguments(whole, 1, 0));
  CAPTURE(parse.err);
  REQUIRE(parse.accepted);
  CHECK(parse.err.empty());
  const auto& host = parse.options;
  CHECK(host.obeys_stdin);
  CHECK(host.local_ranks == 2);
  CHECK(host.ranks_of_nodes == std::vector<int>{4, 2});
  CHECK(host.node_rank == 1);
  CHECK(host.master_addr == "fd00::1");
  CHECK(host.master_port == 0);
  CHECK(host.job_id == "j");
  CHECK(host.join_timeout == std::chrono::seconds(50));
  CHECK_FALSE(host.prefix);
  CHECK(host.max_restarts == whole.max_restarts);
  CHECK(host.elastic->min_ranks == 3);
  CHECK(host.elastic->max_ranks == 6);
  CHECK(host.elastic->hold == whole.elastic->hold);
  CHECK(host.elastic->wait == whole.elastic->wait);
  CHECK(host.elastic->lost_after == whole.elastic->lost_after);
  CHECK(host.command == Words{"--odd", "-np"});
}

TEST_CASE("the line of the port is found among others, and is not passed on", "[pure]") {
  PortLine line;
  CHECK(line.filter("Welcome\nddprun-po") == "Welcome\n");
  CHECK(line.port() == 0);
  CHECK(line.filter("rt 123\r\n[0] loss\nddprun-port 7\n[") == "[0] loss\nddprun-port 7\n[");
  CHECK(line.port() == 123);
  CHECK(line.filter("0] x") == "0] x");
  CHECK(port_of_line(port_line(29500)) == 29500);
  for (const char* text :
       {"ddprun-port \n", "ddprun-port x\n", "ddprun-port 0\n", "port 3\n", "\n"}) {
    CHECK(port_of_line(text) == 0);
  }
}
