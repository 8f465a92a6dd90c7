#include "comm/base/environment.h"

#include <map>
#include <set>

#include "support/catch.h"

using ddp::Environment;
using ddp::first_slurm_host;
using Variables = std::map<std::string, std::string>;

namespace {

Environment read(const Variables& variables) {
  return ddp::read_environment([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  });
}

std::string value(const std::optional<ddp::Setting>& setting) {
  return setting ? setting->value : "nothing";
}

/// Rank, world size and local rank, and rank 0's address and port.
using Place = std::vector<std::string>;
Place place(const Environment& of) {
  return {
      value(of.rank), value(of.world_size), value(of.local_rank), value(of.master_addr),
      value(of.master_port)};
}

std::string name(const std::optional<ddp::Setting>& setting) {
  return setting ? setting->name : "nothing";
}

const Variables kOpenMpi{
    {"OMPI_COMM_WORLD_RANK", "1"},
    {"OMPI_COMM_WORLD_SIZE", "2"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
    {"PMIX_NAMESPACE", "3355508737"}};

const Variables kSlurm{{"SLURM_PROCID", "5"},    {"SLURM_NTASKS", "8"},
                       {"SLURM_LOCALID", "1"},   {"SLURM_JOB_NODELIST", "gpu[07-08]"},
                       {"SLURM_JOB_ID", "4242"}, {"SLURM_STEP_ID", "3"}};

Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

}  // namespace

TEST_CASE("a process has no launcher if no launcher's variable is set", "[comm][pure]") {
  CHECK(read({}).no_launcher);
  CHECK(read({{"GLOO_SOCKET_IFNAME", "eth0"}, {"OMP_NUM_THREADS", "2"}}).no_launcher);
  for (const char* name :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID",
        "SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_JOBID"}) {
    CAPTURE(name);
    CHECK(!read({{name, "0"}}).no_launcher);
  }
}

TEST_CASE("torchrun's and ddprun's variables are read unchanged", "[comm][pure]") {
  const auto environment = read(
      {{"RANK", "1"},
       {"WORLD_SIZE", "4"},
       {"LOCAL_RANK", "0"},
       {"MASTER_ADDR", "10.0.0.1"},
       {"MASTER_PORT", "29500"},
       {"GLOO_SOCKET_IFNAME", "eth0"}});
  CHECK(place(environment) == Place{"1", "4", "0", "10.0.0.1", "29500"});
  CHECK(value(environment.gloo_interfaces) == "eth0");
  CHECK_FALSE(environment.agent_store);
}

TEST_CASE("torchrun's agent has the store if its variable is True", "[comm][pure]") {
  CHECK(read({{"RANK", "0"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}}).agent_store);
  CHECK_FALSE(read({{"RANK", "0"}, {"TORCHELASTIC_USE_AGENT_STORE", "False"}}).agent_store);
}

TEST_CASE("torchrun's attempts have numbers if one agent counts them", "[comm][pure]") {
  const Variables one_agent{
      {"RANK", "0"},
      {"WORLD_SIZE", "2"},
      {"LOCAL_WORLD_SIZE", "2"},
      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
      {"TORCHELASTIC_RESTART_COUNT", "3"}};
  CHECK(value(read(one_agent).attempt) == "3");
  // Only the agent whose rank failed counts the failure.
  CHECK_FALSE(read(with(one_agent, {{"LOCAL_WORLD_SIZE", "1"}})).attempt);
  // The store is rank 0's, and is new in each attempt.
  CHECK_FALSE(read(with(one_agent, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).attempt);
}

TEST_CASE(
    "an empty environment has no rank, and an empty variable counts as unset", "[comm][pure]") {
  CHECK_FALSE(read({}).rank);
  CHECK_FALSE(read({{"RANK", ""}}).rank);
  CHECK(read({}).rank_name == "RANK");
}

TEST_CASE(
    "under mpirun on one host the ranks connect there, at a port derived from the job",
    "[comm][pure]") {
  const auto environment = read(kOpenMpi);
  // 10000 + fnv1a("3355508737") mod 20000.
  CHECK(place(environment) == Place{"1", "2", "1", "127.0.0.1", "15479"});
  CHECK(
      value(read(with(kOpenMpi, {{"PMIX_NAMESPACE", "3355508738"}})).master_port) !=
      value(environment.master_port));
}

TEST_CASE("under MPICH's mpiexec the ranks are Hydra's", "[comm][pure]") {
  const Variables hydra{
      {"PMI_RANK", "1"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}};
  const auto environment = read(with(hydra, {{"SLURM_PROCID", "0"}}));
  CHECK(place(environment) == Place{"1", "4", "0", "nothing", "nothing"});
  CHECK(value(environment.local_world_size) == "2");
  CHECK(environment.address_remedy.find("mpi://") != std::string::npos);
  // srun sets PMI_RANK, too.
  CHECK(value(read({{"PMI_RANK", "1"}, {"SLURM_PROCID", "3"}}).rank) == "3");
}

TEST_CASE("under mpirun on several hosts the user must set MASTER_ADDR", "[comm][pure]") {
  const auto hosts = with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}});
  CHECK_FALSE(read(hosts).master_addr);
  CHECK_FALSE(read(hosts).master_port);
  CHECK(read(hosts).address_remedy.find("-x MASTER_ADDR") != std::string::npos);
  const auto with_address = read(with(hosts, {{"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}}));
  CHECK(value(with_address.master_addr) == "h");
  CHECK(value(with_address.master_port) == "1");
}

TEST_CASE(
    "under srun the first node and the job's number determine address and port", "[comm][pure]") {
  const auto environment = read(kSlurm);
  // 10000 + fnv1a("4242.3") mod 20000.
  CHECK(place(environment) == Place{"5", "8", "1", "gpu07", "15190"});
}

TEST_CASE(
    "SLURM jobs and steps whose numbers differ by a multiple have different ports",
    "[comm][pure]") {
  std::set<int> ports;
  const auto add = [&](int job, int step) {
    const auto environment = read(with(
        kSlurm, {{"SLURM_JOB_ID", std::to_string(job)}, {"SLURM_STEP_ID", std::to_string(step)}}));
    const int port = std::stoi(value(environment.master_port));
    CHECK(port >= 10000);
    CHECK(port < 30000);
    return ports.insert(port).second;
  };
  // 20000 ports. Numbers that differ by 1250 collided when a job had 16 ports.
  for (int i = 0; i < 8; ++i) CHECK(add(4242 + i * 20000, 3));
  for (int i = 1; i < 8; ++i) CHECK(add(4242 + i * 1250, 3));
  for (int i = 1; i < 8; ++i) CHECK(add(4242 + i, 3));
  for (int i = 4; i < 16; ++i) CHECK(add(4242, i));
}

TEST_CASE("MASTER_ADDR and MASTER_PORT take precedence over derived values", "[comm][pure]") {
  const auto job = GENERATE(kOpenMpi, kSlurm);
  const auto environment = read(with(job, {{"MASTER_ADDR", "h"}, {"MASTER_PORT", "7"}}));
  CHECK(value(environment.master_addr) == "h");
  CHECK(value(environment.master_port) == "7");
}

TEST_CASE("a SLURM step's own nodes take precedence over the job's", "[comm][pure]") {
  CHECK(value(read(with(kSlurm, {{"SLURM_STEP_NODELIST", "gpu08"}})).master_addr) == "gpu08");
  auto without = kSlurm;
  without.erase("SLURM_JOB_NODELIST");
  CHECK(value(read(with(without, {{"SLURM_NODELIST", "a,b"}})).master_addr) == "a");
  CHECK(
      value(read(with(without, {{"SLURM_LAUNCH_NODE_IPADDR", "10.1.1.1"}})).master_addr) ==
      "10.1.1.1");
}

TEST_CASE("the innermost launcher determines the rank", "[comm][pure]") {
  // mpirun inside a SLURM job: all ranks of a node inherit the same SLURM_PROCID.
  const auto mpirun_in_slurm = with(kSlurm, kOpenMpi);
  CHECK(name(read(mpirun_in_slurm).rank) == "OMPI_COMM_WORLD_RANK");
  CHECK(name(read(mpirun_in_slurm).local_rank) == "OMPI_COMM_WORLD_LOCAL_RANK");
  // torchrun started by srun or mpirun, once per node.
  const auto torchrun =
      with(mpirun_in_slurm, {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}});
  CHECK(name(read(torchrun).rank) == "RANK");
  CHECK(name(read(torchrun).world_size) == "WORLD_SIZE");
  CHECK(name(read(torchrun).local_rank) == "LOCAL_RANK");
}

TEST_CASE("first_slurm_host returns the first host of a node list", "[comm][pure]") {
  CHECK(first_slurm_host("login") == "login");
  CHECK(first_slurm_host("node-a,node-b") == "node-a");
  CHECK(first_slurm_host("n[07-09,12],login") == "n07");
  CHECK(first_slurm_host("n[3,5]") == "n3");
  CHECK(first_slurm_host("n[12]-ib") == "n12-ib");
  CHECK(first_slurm_host("rack[1-2]n[3-4]") == "rack1n3");
  CHECK(first_slurm_host("a,n[1-2]") == "a");
}

TEST_CASE("a malformed SLURM node list gives no host", "[comm][pure][errors]") {
  CHECK(first_slurm_host("n[1-2").empty());
  CHECK(first_slurm_host("n[]").empty());
  CHECK(first_slurm_host("n[a-b]").empty());
  CHECK(first_slurm_host("").empty());
}
