// Command lines as torchrun's and mpirun's users write them.
#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include <ddp/internal/system/host.h>

#include "launch/environment.h"
#include "launch/hosts/host_list.h"
#include "launch/options.h"
#include "launch/parse.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using ddp::launch::kBadUsage;
using ddp::launch::usable_cores;
using ddp::launch::usable_gpus;
using ddp::launch::world_size;
using ddp::testing::BadLine;
using ddp::testing::Parse;
using ddp::testing::TemporaryFolder;
using Words = std::vector<std::string>;

TEST_CASE("torchrun's lines mean the same with underscores and with hyphens", "[pure]") {
  const Words underscores = {
      "--nproc_per_node=4",
      "--nnodes=2",
      "--node_rank",
      "1",
      "--master_addr",
      "host_0",
      "--master_port=29500",
      "--max_restarts",
      "3",
      "--log_dir",
      "my_logs",
      "--no_python",
      "--rdzv_id=a_b",
      "--rdzv_backend=static",
      "./train",
      "--node_rank",
      "7",
      "--no_python"};
  Words hyphens = {
      "--nproc-per-node=4",
      "--nnodes=2",
      "--node-rank",
      "1",
      "--master-addr",
      "host_0",
      "--master-port=29500",
      "--max-restarts",
      "3",
      "--log-dir",
      "my_logs",
      "--no-python",
      "--rdzv-id=a_b",
      "--rdzv-backend=static",
      "./train",
      "--node_rank",
      "7",
      "--no_python"};
  for (const Words& words : {underscores, hyphens}) {
    const Parse parse(words);
    CAPTURE(parse.err);
    REQUIRE(parse.accepted);
    CHECK(parse.err.empty());
    CHECK(parse.options.local_ranks == 4);
    CHECK(parse.options.nodes == 2);
    CHECK(parse.options.node_rank == 1);
    CHECK(parse.options.master_addr == "host_0");
    CHECK(parse.options.master_port == 29500);
    CHECK(parse.options.max_restarts == 3);
    CHECK(parse.options.log_dir == "my_logs");
    CHECK(parse.options.job_id == "a_b");
    CHECK_FALSE(parse.options.rendezvous);
    CHECK(parse.options.command == Words{"./train", "--node_rank", "7", "--no_python"});
  }
}

TEST_CASE("an option's value and the program's arguments keep their spelling", "[pure]") {
  CHECK(
      Parse({"-n", "1", "--", "--node_rank", "-np"}).options.command ==
      Words{"--node_rank", "-np"});
  CHECK(Parse({"--log_dir", "--node_rank", "-n", "1", "p"}).options.log_dir == "--node_rank");
  CHECK(Parse({"-n1", "p", "-np", "2"}).options.command == Words{"p", "-np", "2"});
  const Parse parse({"-np", "3", "p"});
  CHECK(parse.options.local_ranks == 3);
  CHECK(parse.err.empty());
}

TEST_CASE("options that have no meaning here say so, once each", "[pure]") {
  const Parse parse(
      {"-n", "2", "--role=trainer", "--start_method", "spawn", "--monitor_interval=5", "--tee", "3",
       "-r", "0:1,1:2", "--rdzv_conf", "timeout=900,read_timeout=60", "--rdzv_id", "job", "p"});
  REQUIRE(parse.accepted);
  for (const char* name :
       {"--role", "--start-method", "--monitor-interval", "--tee", "--redirects",
        "--rdzv-conf timeout", "--rdzv-conf read_timeout", "--rdzv-id"}) {
    const auto said = "ddprun: " + std::string(name) + " has no meaning here";
    CAPTURE(parse.err, said);
    const auto place = parse.err.find(said);
    CHECK(place != std::string::npos);
    CHECK(parse.err.find(said, place + 1) == std::string::npos);
  }
  CHECK(Parse({"-n", "2", "--tee", "3", "--log-dir", "x", "--redirects", "0", "p"}).err.empty());
}

TEST_CASE("hosts get their numbers in c10d's rendezvous, unless they have them", "[pure]") {
  const Words line = {"-n",  "2", "--nnodes", "2", "--rdzv-endpoint", "h:1", "--rdzv-backend",
                      "c10d"};
  const auto with = [&](Words more) {
    more.insert(more.begin(), line.begin(), line.end());
    more.push_back("p");
    return Parse(more);
  };
  CHECK(with({}).options.rendezvous);
  CHECK(with({}).options.node_rank == -1);
  CHECK(ddp::launch::hosts_that_agree(with({}).options) == 2);
  CHECK_FALSE(with({}).options.is_first_host.has_value());
  CHECK(with({"--rdzv-conf", "is_host=true"}).options.is_first_host == true);
  const auto both = with({"--rdzv-conf=join_timeout=90,is_host=0"}).options;
  CHECK(both.is_first_host == false);
  CHECK(both.join_timeout == std::chrono::seconds(90));
  CHECK(with({"--rdzv-id", "abc"}).options.job_id == "abc");
  CHECK_FALSE(with({"--node-rank", "1"}).options.rendezvous);
  // One host needs none, and takes the port 0 of torchrun's examples.
  const Parse alone({"-n", "2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "p"});
  CHECK_FALSE(alone.options.rendezvous);
  CHECK(alone.options.master_port == 0);
}

TEST_CASE("MIN:MAX hosts are an elastic job that begins with MIN", "[pure]") {
  const Parse parse(
      {"-n", "3", "--nnodes", "2:4", "--rdzv-endpoint", "h:1", "--rdzv-backend", "c10d",
       "--elastic", "p"});
  CAPTURE(parse.err);
  REQUIRE(parse.accepted);
  CHECK(parse.options.nodes == 4);
  CHECK(parse.options.elastic->min_ranks == 6);
  CHECK(parse.options.elastic->first_ranks == 6);
  CHECK(parse.options.elastic->max_ranks == 12);
  CHECK(Parse({"-n", "1", "--nnodes", "1:1", "p"}).options.nodes == 1);
}

TEST_CASE("ranks of each host, of cores and of GPUs", "[pure]") {
  const Parse parse(
      {"-n", "4,2,1", "--nnodes", "3", "--node-rank", "1", "--rdzv-endpoint", "h:1", "p"});
  REQUIRE(parse.accepted);
  CHECK(parse.options.local_ranks == 2);
  CHECK(world_size(parse.options) == 7);
  CHECK(ddp::launch::global_rank(parse.options, 1) == 5);
  CHECK(Parse({"-n", "cpu", "p"}).options.local_ranks == usable_cores());

  const TemporaryFolder devices;
  CHECK(usable_gpus(devices.path(), {}) == 0);
  CHECK(usable_gpus(devices.file("none"), {}) == 0);
  for (const char* name : {"nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "sda1"}) {
    devices.write(name, "");
  }
  CHECK(usable_gpus(devices.path(), {}) == 3);
  CHECK(usable_gpus(devices.path(), "0,2") == 2);
  CHECK(usable_gpus(devices.path(), "") == 0);
  CHECK(usable_gpus(devices.path(), "1,-1,0") == 1);
  CHECK(usable_gpus(devices.path(), "0,1,2,3") == 3);
  CHECK(usable_gpus(devices.path(), "MIG-a,MIG-b,MIG-c,MIG-d") == 4);
}

TEST_CASE("hosts and the ranks of each come from -H or a file", "[pure]") {
  const TemporaryFolder folder;
  const auto file = folder.write(
      "hosts", "# comment\n\nuser@a slots=4 max_slots=8 # more\nb:2\n  c\r\n[fd00::1]:3\n");
  struct Case {
    Words words;
    Words names;
    std::vector<int> ranks;
  };
  const std::vector<Case> cases = {
      {{"-H", "a:4,b:2"}, {"a", "b"}, {4, 2}},
      {{"-H", "a,b"}, {"a", "b"}, {1, 1}},
      {{"-H", "a,b", "-n", "3"}, {"a", "b"}, {3, 3}},
      {{"-H", "a:4,b:4", "-np", "6"}, {"a", "b"}, {4, 2}},
      {{"-H", "a:4,b:4", "-np", "4"}, {"a"}, {4}},
      {{"-host", "a,b,a"}, {"a", "b"}, {2, 1}},
      {{"-H", "fd00::1,[::1]:2"}, {"fd00::1", "::1"}, {1, 2}},
      {{"--hostfile", file}, {"user@a", "b", "c", "fd00::1"}, {4, 2, 1, 3}},
      {{"-machinefile", file, "-np", "5"}, {"user@a", "b"}, {4, 1}},
  };
  for (const auto& one : cases) {
    auto words = one.words;
    words.push_back("p");
    const Parse parse(words);
    CAPTURE(words, parse.err);
    REQUIRE(parse.accepted);
    REQUIRE(parse.options.hosts);
    CHECK(parse.options.hosts->names == one.names);
    CHECK(parse.options.hosts->rsh.front() == "ssh");
    CHECK(parse.options.ranks_of_nodes == one.ranks);
    CHECK(parse.options.nodes == static_cast<int>(one.names.size()));
  }
  const Parse parse(
      {"--hostfile", file, "--rsh", "my-rsh -a b", "-x", "A=1", "-x", "PATH", "--master-port", "7",
       "p"});
  CHECK(parse.options.master_addr == "a");
  CHECK(parse.options.master_port == 7);
  CHECK(parse.options.hosts->rsh == Words{"my-rsh", "-a", "b"});
  CHECK(parse.options.hosts->variables == Words{"A=1", "PATH"});
  CHECK(parse.options.command == Words{"p"});
}

TEST_CASE("the first host's address is one that the others reach", "[pure]") {
  using ddp::launch::address_of_first;
  CHECK(address_of_first({"user@a", "b"}, "own") == "a");
  for (const char* name :
       {"localhost", "user@localhost", "localhost.localdomain", "127.0.0.1", "::1"}) {
    CAPTURE(name);
    CHECK(address_of_first({name, "b"}, "own") == "own");
    CHECK_THROWS_WITH(
        address_of_first({name, "b"}, "localhost"), ContainsText("Give it, or --master-addr"));
  }
  CHECK(address_of_first({"localhosts", "b"}, "own") == "localhosts");
  CHECK(address_of_first({"a", "localhost"}, "own") == "a");
  // All are this host.
  CHECK(address_of_first({"127.0.0.1", "localhost"}, "own") == "127.0.0.1");
  CHECK(address_of_first({"localhost"}, "own") == "localhost");

  const Words line = {"-H", "localhost:4,b:4", "p"};
  CHECK(Parse(line).options.master_addr == ddp::host_name());
  const Parse given({"-H", "localhost:4,b:4", "--master-addr", "10.0.0.1", "p"});
  CHECK(given.options.master_addr == "10.0.0.1");
}

TEST_CASE("every other option of torchrun 2.11 is taken, and has no meaning here", "[pure]") {
  const std::vector<Words> options = {
      {"--local-ranks-filter", "0,1"},
      {"--duplicate-stdout-filters", "a,b"},
      {"--duplicate-stderr-filters", "a,b"},
      {"--event-log-handler", "null"},
      {"--logs-specs", "x"},
      {"--numa-binding", "node"},
      {"--signals-to-handle", "SIGTERM,SIGINT"},
      {"--virtual-local-rank"}};
  for (const auto& option : options) {
    for (const bool has_underscores : {false, true}) {
      Words words = option;
      if (has_underscores) std::replace(words[0].begin() + 2, words[0].end(), '-', '_');
      words.insert(words.end(), {"-n", "2", "p"});
      const Parse parse(words);
      CAPTURE(words, parse.err);
      REQUIRE(parse.accepted);
      CHECK(parse.err == "ddprun: " + option[0] + " has no meaning here\n");
      CHECK(parse.options.local_ranks == 2);
      CHECK(parse.options.command == Words{"p"});
    }
  }
}

TEST_CASE("what torchrun's and mpirun's lines may not say is refused", "[pure]") {
  const TemporaryFolder folder;
  const auto empty = folder.write("empty", "# nothing\n");
  const auto odd = folder.write("odd", "a 4\n");
  const std::vector<BadLine> cases = {
      {{"-n", "2", "--rdzv-backend", "etcd", "p"}, {"--rdzv-backend", "c10d or static", "'etcd'"}},
      {{"-n", "2", "--tee", "4", "p"}, {"--tee", "0 to 3", "'4'"}},
      {{"-n", "2", "--redirects", "0:1,x:2", "p"}, {"--redirects", "'0:1,x:2'"}},
      {{"-n", "2", "--rdzv-conf", "abc", "p"}, {"--rdzv-conf", "KEY=VALUE", "'abc'"}},
      {{"-n", "2", "--nnodes", "2", "--rdzv-endpoint", "h:1", "--rdzv-backend", "c10d",
        "--rdzv-conf", "is_host=maybe", "p"},
       {"--rdzv-conf", "is_host=true or is_host=false", "'is_host=maybe'"}},
      {{"-n", "2", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h:1",
        "--rdzv-conf", "join_timeout=0", "p"},
       {"--rdzv-conf", "join_timeout to be 1 to 86400", "'join_timeout=0'"}},
      {{"-n", "2", "--rdzv-id", "a b", "p"}, {"--rdzv-id", "word", "'a b'"}},
      {{"-n", "2", "--elastic", "--token", "a", "--rdzv-id", "a", "p"}, {"--rdzv-id", "--token"}},
      {{"-n", "2", "--nnodes", "2:4", "--rdzv-endpoint", "h:1", "p"},
       {"--nnodes", "--elastic beside MIN:MAX", "'2:4'", "--max-restarts"}},
      {{"-n", "2", "--nnodes", "4:2", "p"}, {"--nnodes", "MIN:MAX", "'4:2'"}},
      {{"-n", "2", "--nnodes", "1:2:3", "p"}, {"--nnodes", "'1:2:3'"}},
      {{"-n", "2", "--nnodes", "2", "--rdzv-backend", "c10d", "p"}, {"--rdzv-endpoint"}},
      {{"-n", "2", "--nnodes", "2", "--rdzv-endpoint", "h:0", "--rdzv-backend", "c10d", "p"},
       {"--rdzv-endpoint", "1 to 65535", "'h:0'"}},
      {{"-n", "4,2", "p"}, {"--nproc-per-node", "one for each of --nnodes (1)", "'4,2'"}},
      {{"-n", "4,x", "p"}, {"--nproc-per-node", "'4,x'"}},
      {{"-n", "many", "p"}, {"auto, cpu, gpu", "'many'"}},
      {{"-m", "module"}, {"unknown option '-m'", "python -m MODULE"}},
      {{"-n", "2", "-m", "module"}, {"unknown option '-m'", "python -m MODULE"}},
      {{"-n", "2", "--run_path", "a.py"}, {"unknown option '--run_path'", "python SCRIPT"}},
      {{"-np", "2", "-n", "2", "p"}, {"--np", "--nproc-per-node"}},
      {{"-np", "2", "--nnodes", "2", "--rdzv-endpoint", "h:1", "p"}, {"--np", "--nproc-per-node"}},
      {{"-H", "a:4,b:4", "-np", "9", "p"}, {"-H", "at most the hosts' 8 ranks", "'9'"}},
      {{"-H", "a:4", "-n", "2", "p"}, {"-H", "a:4", "got 2", "-np"}},
      {{"-H", "a,b", "-n", "gpu", "p"}, {"--nproc-per-node", "'gpu'"}},
      {{"-H", "a:x", "p"}, {"-H", "HOST:RANKS", "'a:x'"}},
      {{"-H", "a:0", "p"}, {"-H", "HOST:RANKS", "'a:0'"}},
      {{"-H", "a,,b", "p"}, {"-H", "a host's name", "''"}},
      {{"-H", "a, b", "p"}, {"-H", "a host's name", "' b'"}},
      {{"-H", "-oProxyCommand=x", "p"}, {"-H", "a host's name", "'-oProxyCommand=x'"}},
      {{"-H", "a", "--hostfile", odd, "p"}, {"-H", "--hostfile"}},
      {{"--hostfile", empty, "p"}, {"--hostfile", "a line for each host"}},
      {{"--hostfile", odd, "p"}, {"--hostfile", "HOST slots=RANKS", "'a 4'"}},
      {{"--hostfile", folder.file("none"), "p"}, {"--hostfile", "can be read", "none"}},
      {{"--hostfile", folder.path(), "p"}, {"--hostfile", "can be read"}},
      {{"-H", "a", "--nnodes", "2", "p"}, {"-H", "--nnodes"}},
      {{"-H", "a", "--node-rank", "0", "p"}, {"-H", "--node-rank"}},
      {{"-H", "a:1000,a:25", "p"}, {"-H", "at most 1024 ranks on a host", "'a'"}},
      {{"-H", "a", "-x", "DDP_TEST_NOT_SET", "p"}, {"-x", "that is set", "'DDP_TEST_NOT_SET'"}},
      {{"-H", "a", "-x", "-u", "p"}, {"-x", "NAME=VALUE", "'-u'"}},
      {{"-H", "a", "--rsh", " ", "p"}, {"--rsh"}},
      {{"-n", "1", "--rsh", "x", "p"}, {"--rsh", "-H or --hostfile"}},
      {{"-n", "1", "-x", "PATH", "p"}, {"-x", "-H or --hostfile"}},
  };
  for (const BadLine& bad : cases) {
    const Parse parse(bad.words);
    CAPTURE(bad.words, parse.err);
    CHECK_FALSE(parse.accepted);
    CHECK(parse.exit_code == kBadUsage);
    CHECK_THAT(parse.err, Catch::Matchers::StartsWith("ddprun: ") && ContainsText("--help"));
    for (const auto& text : bad.said) CHECK_THAT(parse.err, ContainsText(text));
  }
}
