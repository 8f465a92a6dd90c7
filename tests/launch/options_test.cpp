#include "launch/options.h"

#include <chrono>
#include <string>
#include <vector>

#include "launch/environment.h"
#include "launch/parse.h"

#include "support/catch.h"

using ddp::launch::kBadUsage;
using ddp::launch::usable_cores;
using ddp::testing::BadLine;
using ddp::testing::Parse;
using ddp::testing::PetVariables;
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
      {{"--nproc", "2", "p"}, {"unknown option '--nproc'"}},
      {{"-n", "2", "--log-dir=", "./train", "data"}, {"--log-dir", "after '='", "got nothing"}},
      {{"--nproc_per_node=", "p"}, {"--nproc-per-node", "after '='"}},
      {{"-n", "2", "--nnodes", "2", "p"},
       {"--rdzv-endpoint, the same on every host", "--master-addr and --master-port"}},
      {{"-n", "2", "--nnodes", "2", "--master-addr", "h", "p"}, {"--master-port"}},
      {{"-n", "2", "--rdzv-endpoint", "h", "p"}, {"--rdzv-endpoint", "HOST:PORT", "'h'"}},
      {{"-n", "2", "--rdzv-endpoint", ":1", "p"}, {"--rdzv-endpoint", "HOST:PORT"}},
      {{"-n", "2", "--rdzv-endpoint", "h:0", "p"}, {"--rdzv-endpoint", "1 to 65535"}},
      {{"-n", "2", "--rdzv-endpoint", "h:", "p"}, {"--rdzv-endpoint", "HOST:PORT", "'h:'"}},
      {{"-n", "2", "--rdzv-endpoint", "::1", "p"}, {"--rdzv-endpoint", "HOST:PORT", "'::1'"}},
      {{"-n", "2", "--rdzv-endpoint", "http://h:1", "p"}, {"--rdzv-endpoint", "'http://h:1'"}},
      {{"-n", "2", "--rdzv-endpoint", " h:1", "p"}, {"--rdzv-endpoint", "' h:1'"}},
      {{"-n", "2", "--master-addr", "h:1", "p"}, {"--master-addr", "name or address", "'h:1'"}},
      {{"-n", "2", "--master-addr", "h h", "p"}, {"--master-addr", "'h h'"}},
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

TEST_CASE("an endpoint's host may be an address of IPv6", "[pure]") {
  const auto of = [](const std::string& endpoint, const char* backend) {
    const Parse parse(
        {"-n", "2", "--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-backend", backend, "p"});
    CAPTURE(parse.err);
    CHECK(parse.accepted);
    return parse.options.master_addr + " " + std::to_string(parse.options.master_port);
  };
  CHECK(of("h:1", "static") == "h 1");
  CHECK(of("[::1]:29500", "static") == "::1 29500");
  CHECK(of("::1:29500", "static") == "::1 29500");
  CHECK(of("fe80::1%eth0:29500", "static") == "fe80::1%eth0 29500");
  // Torchrun's port where the endpoint has none.
  CHECK(of("host_0", "c10d") == "host_0 29400");
  CHECK(of("::1", "c10d") == "::1 29400");
  CHECK(of("[2001:db8::1]", "c10d") == "2001:db8::1 29400");
  CHECK(Parse({"-n", "2", "--master-addr", "[::1]", "p"}).options.master_addr == "::1");
  // One host has a free port.
  const Parse alone({"-n", "2", "--rdzv-endpoint", "h", "--rdzv-backend", "c10d", "p"});
  CHECK(alone.options.master_port == 0);
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

namespace {

// As Kubeflow's TrainJob has them in its second pod.
const PetVariables kTrainJob{
    {"PET_NNODES", "2"},
    {"PET_NPROC_PER_NODE", "3"},
    {"PET_NODE_RANK", "1"},
    {"PET_MASTER_ADDR", "train-node-0-0.train"},
    {"PET_MASTER_PORT", "29400"}};

// As a PyTorchJob with an elastic policy has them.
const PetVariables kElasticJob{
    {"PET_NNODES", "2:4"},
    {"PET_NPROC_PER_NODE", "3"},
    {"PET_RDZV_ENDPOINT", "train-worker-0:23456"},
    {"PET_RDZV_BACKEND", "c10d"},
    {"PET_RDZV_ID", "job"},
    {"PET_RDZV_CONF", "is_host=true"}};

PetVariables with_pet(PetVariables variables, const PetVariables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

}  // namespace

TEST_CASE("PET_* variables are the defaults of options", "[pure]") {
  const Parse parse({"p"}, kTrainJob);
  REQUIRE(parse.accepted);
  CHECK(parse.options.nodes == 2);
  CHECK(parse.options.local_ranks == 3);
  CHECK(parse.options.node_rank == 1);
  CHECK(parse.options.master_addr == "train-node-0-0.train");
  CHECK(parse.options.master_port == 29400);
  CHECK(parse.options.max_restarts == 0);

  const auto restarts =
      Parse({"p"}, with_pet(kTrainJob, {{"PET_MAX_RESTARTS", "4"}, {"PET_LOG_DIR", "logs"}}));
  CHECK(restarts.options.max_restarts == 4);
  CHECK(restarts.options.log_dir == "logs");
}

TEST_CASE("the command line wins over PET_* variables", "[pure]") {
  CHECK(Parse({"-n", "2", "p"}, kTrainJob).options.local_ranks == 2);
  CHECK(Parse({"-n", "2", "p"}, kTrainJob).options.nodes == 2);
  CHECK(Parse({"--node-rank", "0", "p"}, kTrainJob).options.node_rank == 0);
  const auto address = Parse({"--master-addr", "h", "p"}, kTrainJob).options;
  CHECK(address.master_addr == "h");
  CHECK(address.master_port == 29400);
  CHECK(Parse({"--rdzv-endpoint", "h:7", "p"}, kTrainJob).options.master_addr == "h");
  const auto endpoint = with_pet(kTrainJob, {{"PET_RDZV_ENDPOINT", "e:8"}});
  CHECK(Parse({"p"}, endpoint).options.master_addr == "e");
  const auto other_form =
      Parse({"--master-addr", "h", "--master-port", "9", "p"}, endpoint).options;
  CHECK(other_form.master_addr == "h");
  CHECK(other_form.master_port == 9);
}

TEST_CASE("one host of the command line takes no hosts of PET_* variables", "[pure]") {
  for (const Words& words : {Words{"--standalone", "p"}, Words{"--nnodes", "1", "p"}}) {
    const Parse parse(words, kTrainJob);
    CAPTURE(parse.err);
    REQUIRE(parse.accepted);
    CHECK(parse.options.nodes == 1);
    CHECK(parse.options.node_rank == 0);
    CHECK(parse.options.master_port == 0);
    CHECK(parse.options.local_ranks == 3);
  }
  const auto standalone = Parse({"p"}, with_pet(kTrainJob, {{"PET_STANDALONE", "1"}}));
  REQUIRE(standalone.accepted);
  CHECK(standalone.options.nodes == 1);
  CHECK(Parse({"--coordinate", "29600", "--max-ranks", "8"}, kTrainJob).accepted);
}

TEST_CASE("PET_* variables are read as torchrun's options are", "[pure]") {
  CHECK(Parse({"p"}, {{"PET_NPROC_PER_NODE", "cpu"}}).options.local_ranks == usable_cores());
  CHECK(Parse({"p"}, {{"PET_NPROC_PER_NODE", "auto"}}).accepted);
  const Parse parse({"--elastic", "p"}, kElasticJob);
  CAPTURE(parse.err);
  REQUIRE(parse.accepted);
  CHECK(parse.err.empty());
  CHECK(parse.options.nodes == 4);
  CHECK(parse.options.elastic->first_ranks == 6);
  CHECK(parse.options.elastic->max_ranks == 12);
  CHECK(parse.options.rendezvous);
  CHECK(parse.options.node_rank == -1);
  CHECK(parse.options.is_first_host == true);
  CHECK(parse.options.job_id == "job");
  // A number for the host, as --node-rank beside --rdzv-backend c10d.
  CHECK_FALSE(Parse({"p"}, with_pet(kTrainJob, {{"PET_RDZV_BACKEND", "c10d"}})).options.rendezvous);
}

TEST_CASE("torchrun's and mpirun's lines win over PET_* variables", "[pure]") {
  const Parse parse(
      {"--nproc_per_node=1", "--nnodes=2", "--node_rank", "1", "--rdzv_backend=static",
       "--rdzv_id=own", "p"},
      kElasticJob);
  CAPTURE(parse.err);
  REQUIRE(parse.accepted);
  CHECK(parse.options.local_ranks == 1);
  CHECK(parse.options.nodes == 2);
  CHECK(parse.options.node_rank == 1);
  CHECK_FALSE(parse.options.rendezvous);
  CHECK(parse.options.job_id == "own");
  const auto named = Parse({"--elastic", "--token", "t", "p"}, kElasticJob).options;
  CHECK(named.elastic->token == "t");
  CHECK(named.job_id.empty());
  CHECK(Parse({"--nnodes=1:1", "p"}, kElasticJob).options.master_port == 0);

  CHECK(Parse({"-np", "2", "p"}, {{"PET_NPROC_PER_NODE", "3"}}).options.local_ranks == 2);
  CHECK_THAT(Parse({"-np", "2", "p"}, kTrainJob).err, ContainsText("--np: expected at most"));
  const auto etcd = with_pet(kTrainJob, {{"PET_RDZV_BACKEND", "etcd"}});
  CHECK(Parse({"--rdzv-endpoint", "h:1", "p"}, etcd).accepted);
  CHECK(Parse({"--rdzv-backend", "static", "p"}, etcd).accepted);
}

TEST_CASE("hosts of -H, and a host's ddprun, take none of PET_* variables", "[pure]") {
  for (const auto& variables : {kTrainJob, kElasticJob}) {
    const Parse parse({"-H", "a:4,b", "p"}, with_pet(variables, {{"PET_LOG_DIR", "logs"}}));
    CAPTURE(parse.err);
    REQUIRE(parse.accepted);
    REQUIRE(parse.options.hosts);
    CHECK(parse.options.hosts->names == Words{"a", "b"});
    CHECK(parse.options.ranks_of_nodes == std::vector<int>{4, 1});
    CHECK(parse.options.master_addr == "a");
    CHECK(parse.options.master_port == 0);
    CHECK(parse.options.job_id.empty());
    CHECK(parse.options.log_dir == "logs");
  }
  const auto started =
      Parse({"--obey-stdin", "-n", "1", "p"}, with_pet(kTrainJob, {{"PET_LOG_DIR", "logs"}}));
  REQUIRE(started.accepted);
  CHECK(started.options.nodes == 1);
  CHECK(started.options.log_dir.empty());
}

TEST_CASE("a bad PET_* variable is an error that names it", "[pure][errors]") {
  const auto error = [](const Words& words, const PetVariables& more) {
    const Parse parse(words, with_pet(kTrainJob, more));
    CHECK(parse.exit_code == kBadUsage);
    return parse.err;
  };
  CHECK_THAT(
      error({"p"}, {{"PET_NNODES", "4:1"}}),
      ContainsText("ddprun: PET_NNODES: expected a whole number from 1 to 65536, or MIN:MAX, got "
                   "'4:1'. Give --nnodes on the command line"));
  CHECK_THAT(
      error({"p"}, {{"PET_NNODES", "1:4"}}),
      ContainsText("--nnodes: expected --elastic beside MIN:MAX"));
  CHECK_THAT(error({"p"}, {{"PET_NPROC_PER_NODE", "gpus"}}), ContainsText("PET_NPROC_PER_NODE: "));
  CHECK_THAT(
      error({"p"}, {{"PET_RDZV_BACKEND", "etcd-v2"}}),
      ContainsText("PET_RDZV_BACKEND: expected static or c10d, got 'etcd-v2'"));
  CHECK_THAT(error({"p"}, {{"PET_NODE_RANK", "2"}}), ContainsText("--node-rank: expected less"));
  struct Bad {
    const char* variable;
    const char* value;
    Words words;
    PetVariables beside;
    std::string said;
  };
  const std::vector<Bad> cases = {
      {"PET_NNODES", "1:4", {}, {}, "PET_NNODES='1:4' as --nnodes: expected --elastic beside"},
      {"PET_NNODES",
       "2",
       {},
       {{"PET_MASTER_PORT", ""}},
       "PET_NNODES='2' as --nnodes 2: expected --rdzv-endpoint, the same on every host, or "
       "--master-addr and --master-port. --master-addr is PET_MASTER_ADDR='train-node-0-0.train'."},
      {"PET_NPROC_PER_NODE",
       "4,2,1",
       {},
       {},
       "PET_NPROC_PER_NODE='4,2,1' as --nproc-per-node: expected one number, or one for each of "
       "--nnodes (2), got '4,2,1'. --nnodes is PET_NNODES='2'."},
      {"PET_NODE_RANK",
       "2",
       {},
       {},
       "PET_NODE_RANK='2' as --node-rank: expected less than --nnodes (2), got 2. --nnodes is "
       "PET_NNODES='2'."},
      {"PET_NODE_RANK",
       "x",
       {},
       {},
       "PET_NODE_RANK: expected a whole number from 0 to 65535, got 'x'"},
      {"PET_RDZV_ENDPOINT", "h:", {}, {}, "PET_RDZV_ENDPOINT: expected HOST:PORT"},
      {"PET_RDZV_ENDPOINT", "h", {}, {}, "PET_RDZV_ENDPOINT='h' as --rdzv-endpoint: expected"},
      {"PET_RDZV_ENDPOINT", "h:0", {}, {}, "PET_RDZV_ENDPOINT='h:0' as --rdzv-endpoint: expected"},
      {"PET_MASTER_PORT", "x", {}, {}, "PET_MASTER_PORT: expected a whole number from 1 to 65535"},
      {"PET_RDZV_BACKEND", "etcd", {}, {}, "PET_RDZV_BACKEND: expected static or c10d, got 'etcd'"},
      {"PET_RDZV_ID",
       "a b",
       {},
       {},
       "PET_RDZV_ID: expected a word without spaces and '/', got 'a b'"},
      {"PET_RDZV_CONF", "x", {}, {}, "PET_RDZV_CONF='x' as --rdzv-conf: expected KEY=VALUE"},
      {"PET_RDZV_CONF",
       "join_timeout=0",
       {"--max-restarts", "1"},
       {},
       "PET_RDZV_CONF='join_timeout=0' as --rdzv-conf: expected join_timeout to be 1 to 86400"},
      {"PET_MAX_RESTARTS", "-1", {}, {}, "PET_MAX_RESTARTS: expected a whole number from 0"},
      {"PET_LOG_DIR",
       "x",
       {"--no-prefix"},
       {},
       "PET_LOG_DIR='x' as --log-dir: expected no --no-prefix beside it"}};
  for (const auto& bad : cases) {
    auto words = bad.words;
    words.push_back("p");
    auto variables = bad.beside;
    variables[bad.variable] = bad.value;
    CAPTURE(bad.variable, bad.value);
    CHECK_THAT(error(words, variables), ContainsText("ddprun: " + bad.said));
  }
  CHECK_THAT(
      error({"--node-rank", "5", "p"}, {}),
      ContainsText("ddprun: --node-rank: expected less than --nnodes (2), got 5. --nnodes is "
                   "PET_NNODES='2'."));
  const auto note = Parse({"p"}, with_pet(kTrainJob, {{"PET_RDZV_CONF", "timeout=9"}})).err;
  CHECK_THAT(note, ContainsText("PET_RDZV_CONF='timeout=9' as --rdzv-conf timeout has no meaning"));
  // Not needed, so it does no harm.
  CHECK(Parse({"-n", "2", "p"}, with_pet(kTrainJob, {{"PET_NPROC_PER_NODE", "gpu"}})).accepted);
  CHECK(Parse({"p"}, with_pet(kTrainJob, {{"PET_NNODES", ""}, {"PET_NODE_RANK", ""}})).accepted);
  CHECK(Parse({"p"}, {}).exit_code == kBadUsage);
}
