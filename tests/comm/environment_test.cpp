#include "comm/base/environment.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <map>
#include <set>

#include <ddp/internal/system/fd.h>

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
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK",
        "SLURM_PROCID", "HOROVOD_RANK", "FLUX_JOB_SIZE"}) {
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
  CHECK_FALSE(environment.launcher_socket);
  CHECK(environment.address_remedy.find("mpi://") != std::string::npos);
  // srun sets PMI_RANK, too.
  CHECK(value(read({{"PMI_RANK", "1"}, {"SLURM_PROCID", "3"}}).rank) == "3");
}

TEST_CASE("under MPICH's mpiexec on one host the ranks connect there", "[comm][pure]") {
  const Variables one_host{
      {"PMI_RANK", "1"},
      {"PMI_SIZE", "2"},
      {"MPI_LOCALRANKID", "1"},
      {"MPI_LOCALNRANKS", "2"},
      {"PMI_FD", "9"}};
  CHECK(value(read(one_host).master_addr) == "127.0.0.1");
  CHECK_FALSE(read(one_host).master_port);
  CHECK(value(read(one_host).launcher_socket) == "9");
  CHECK_FALSE(read(with(one_host, {{"MASTER_PORT", "7"}})).launcher_socket);
}

TEST_CASE("the port of a job follows from the process that started its ranks", "[comm][pure]") {
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  const ddp::Fd first(ends[0]), second(ends[1]);
  const auto port_at = [](int fd) {
    return value(ddp::port_of_launcher({"PMI_FD", std::to_string(fd)}));
  };
  // This process has made both.
  CHECK(port_at(ends[0]) == port_at(ends[1]));
  const int port = std::stoi(port_at(ends[0]));
  CHECK(port >= 10000);
  CHECK(port < 30000);

  const ddp::Fd no_socket(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  CHECK(port_at(no_socket.get()) == "nothing");
  CHECK_FALSE(ddp::port_of_launcher({"PMI_FD", "x"}));
}

TEST_CASE("mpirun spreads ranks over the hosts of a SLURM job, in their order", "[comm][pure]") {
  const Variables allocation{{"SLURM_JOB_ID", "4242"}, {"SLURM_JOB_NODELIST", "gpu[07-08]"}};
  const auto launcher = with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}});
  const auto environment = read(with(allocation, launcher));
  CHECK(value(environment.master_addr) == "gpu07");
  CHECK(environment.master_port);
  const auto another =
      with(with(allocation, launcher), {{"SLURM_JOB_ID", "4243"}, {"PMIX_NAMESPACE", "7"}});
  CHECK(value(read(another).master_port) != value(environment.master_port));
  // Nothing tells two of MPICH's jobs in an allocation from each other.
  const Variables mpich{{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "0"}};
  CHECK_FALSE(read(with(allocation, mpich)).master_addr);
  CHECK_FALSE(read(with(allocation, mpich)).master_port);
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

namespace {

/// The environment of a system's second process, and what is read of it: rank, world size, local
/// rank and MASTER_ADDR, "-" for nothing, or a part of the text of the error.
struct Engine {
  const char* name;
  Variables variables;
  std::string expected;
};

std::string text_of(const Environment& environment) {
  if (!environment.problem.empty()) return environment.problem;
  if (environment.no_launcher) return environment.doubt.empty() ? "alone" : environment.doubt;
  std::string text;
  for (const auto* setting :
       {&environment.rank, &environment.world_size, &environment.local_rank,
        &environment.master_addr}) {
    text += (text.empty() ? "" : " ") + (*setting ? (*setting)->value : "-");
  }
  return text;
}

const Engine kEngines[] = {
    {"Azure ML, Ray",
     {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "h"}},
     "1 2 1 h"},
    {"PyTorchJob, Volcano",
     {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"PET_NPROC_PER_NODE", "1"}},
     "1 2 - h"},
    {"PyTorchJob with nprocPerNode",
     {{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "h"}, {"PET_NPROC_PER_NODE", "2"}},
     "expected LOCAL_RANK in the environment beside PET_NPROC_PER_NODE=\"2\", got nothing"},
    {"PyTorchJob with nprocPerNode, torchrun in it",
     {{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"PET_NPROC_PER_NODE", "2"}},
     "3 4 1 -"},
    {"TrainJob",
     {{"PET_NNODES", "2"}, {"PET_NPROC_PER_NODE", "1"}, {"JOB_COMPLETION_INDEX", "1"}},
     "got only PET_NNODES=\"2\", so there are 2 processes or hosts. Run ddprun ./train in each "
     "pod"},
    {"TrainJob, elastic", {{"PET_NNODES", "1:4"}}, "got only PET_NNODES=\"1:4\", so there are 4"},
    {"TrainJob of one pod",
     {{"PET_NNODES", "1"}, {"PET_NPROC_PER_NODE", "2"}},
     "got only PET_NPROC_PER_NODE=\"2\""},
    {"TrainJob of one process",
     {{"PET_NNODES", "1"}, {"PET_NPROC_PER_NODE", "1"}, {"JOB_COMPLETION_INDEX", "0"}},
     "alone"},
    {"a pod of many that has one process",
     {{"PET_NPROC_PER_NODE", "1"}, {"JOB_COMPLETION_INDEX", "3"}},
     "got only JOB_COMPLETION_INDEX=\"3\""},
    {"indexed Job, JobSet",
     {{"JOB_COMPLETION_INDEX", "1"}, {"KUBERNETES_PORT", "tcp://10.96.0.1:443"}},
     "got only JOB_COMPLETION_INDEX=\"1\", so there are several processes or pods. Run ddprun"},
    {"indexed Job's first pod",
     {{"JOB_COMPLETION_INDEX", "0"}},
     "a world of one rank, but with JOB_COMPLETION_INDEX=\"0\" it may be the first of several"},
    {"ddprun in an indexed Job",
     {{"JOB_COMPLETION_INDEX", "1"}, {"RANK", "2"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "0"}},
     "2 4 0 -"},
    {"MVAPICH2",
     {{"MV2_COMM_WORLD_RANK", "1"},
      {"MV2_COMM_WORLD_SIZE", "2"},
      {"MV2_COMM_WORLD_LOCAL_RANK", "1"},
      {"MV2_COMM_WORLD_LOCAL_SIZE", "2"}},
     "1 2 1 127.0.0.1"},
    {"Intel MPI",
     {{"PMI_RANK", "1"},
      {"PMI_SIZE", "2"},
      {"MPI_LOCALRANKID", "0"},
      {"MPI_LOCALNRANKS", "1"},
      {"I_MPI_INFO_NP", "2"}},
     "1 2 0 -"},
    {"PALS",
     {{"PALS_RANKID", "1"},
      {"PALS_LOCAL_RANKID", "1"},
      {"PALS_LOCAL_SIZE", "2"},
      {"PMI_RANK", "1"},
      {"PMI_SIZE", "2"},
      {"PMI_LOCAL_RANK", "1"},
      {"PMI_LOCAL_SIZE", "2"}},
     "1 2 1 127.0.0.1"},
    {"PALS with PMIx",
     {{"PALS_RANKID", "1"},
      {"PALS_LOCAL_RANKID", "1"},
      {"PALS_LOCAL_SIZE", "2"},
      {"PMIX_RANK", "1"}},
     "1 - 1 -"},
    {"Cray's PMI",
     {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"PMI_LOCAL_RANK", "0"}, {"PMI_LOCAL_SIZE", "1"}},
     "1 2 0 -"},
    {"Flux",
     {{"FLUX_TASK_RANK", "1"},
      {"FLUX_TASK_LOCAL_ID", "1"},
      {"FLUX_JOB_SIZE", "2"},
      {"FLUX_JOB_NNODES", "1"},
      {"FLUX_JOB_ID", "f1"},
      {"PMI_RANK", "1"},
      {"PMI_SIZE", "2"},
      {"PMI_FD", "9"}},
     "1 2 1 127.0.0.1"},
    {"Flux over two hosts, without PMI",
     {{"FLUX_TASK_RANK", "1"},
      {"FLUX_TASK_LOCAL_ID", "0"},
      {"FLUX_JOB_SIZE", "2"},
      {"FLUX_JOB_NNODES", "2"}},
     "1 2 0 -"},
    {"LSF's jsrun",
     {{"JSM_NAMESPACE_RANK", "1"},
      {"JSM_NAMESPACE_SIZE", "2"},
      {"JSM_NAMESPACE_LOCAL_RANK", "1"},
      {"JSM_NAMESPACE_LOCAL_SIZE", "2"},
      {"LSB_JOBID", "7"},
      {"PMIX_RANK", "1"}},
     "1 2 1 127.0.0.1"},
    {"LSF's blaunch",
     {{"LSB_JOBID", "7"}, {"LSB_DJOB_NUMPROC", "2"}, {"LSF_PM_TASKID", "2"}},
     "got only LSB_DJOB_NUMPROC=\"2\""},
    {"LSF, one process with two cores", {{"LSB_JOBID", "7"}, {"LSB_DJOB_NUMPROC", "2"}}, "alone"},
    {"PBS' pbsdsh",
     {{"PBS_JOBID", "7"}, {"PBS_NODENUM", "1"}, {"PBS_TASKNUM", "2"}},
     "got only PBS_TASKNUM=\"2\""},
    {"PBS' script", {{"PBS_JOBID", "7"}, {"PBS_NODENUM", "0"}, {"PBS_TASKNUM", "1"}}, "alone"},
    {"PRRTE", {{"PMIX_RANK", "0"}, {"PMIX_NAMESPACE", "p-1@1"}}, "got only PMIX_RANK=\"0\""},
    {"Horovod",
     {{"HOROVOD_RANK", "1"},
      {"HOROVOD_SIZE", "2"},
      {"HOROVOD_LOCAL_RANK", "1"},
      {"HOROVOD_LOCAL_SIZE", "2"},
      {"HOROVOD_GLOO_RENDEZVOUS_PORT", "9"}},
     "1 2 1 127.0.0.1"},
    {"SageMaker",
     {{"SM_HOSTS", R"(["algo-1","algo-2"])"}, {"SM_CURRENT_HOST", "algo-2"}},
     R"(got only SM_HOSTS="["algo-1","algo-2"]", so there are 2 processes or hosts. Run ddprun)"},
    {"SageMaker, one host", {{"SM_HOSTS", R"(["algo-1"])"}}, "alone"},
    {"Vertex",
     {{"CLUSTER_SPEC",
       R"({"cluster":{"workerpool0":["a:1"],"workerpool1":["b:1"]},"task":{"type":"workerpool1"}})"}},
     "so there are 2 processes or hosts"},
    {"Vertex, one host",
     {{"CLUSTER_SPEC", R"({"cluster":{"workerpool0":["a:1"]},"job":{"args":["--x","y"]}})"}},
     "alone"},
    {"TF_CONFIG",
     {{"TF_CONFIG", R"({"cluster":{"worker":["a:1","b:1"]},"task":{"type":"worker","index":1}})"}},
     "got only TF_CONFIG="},
    {"SkyPilot",
     {{"SKYPILOT_NUM_NODES", "2"}, {"SKYPILOT_NODE_RANK", "1"}},
     "got only SKYPILOT_NUM_NODES=\"2\", so there are 2 processes or hosts. Run ddprun -n RANKS"},
    {"SkyPilot, one host", {{"SKYPILOT_NUM_NODES", "1"}, {"SKYPILOT_NODE_RANK", "0"}}, "alone"},
    {"AWS Batch",
     {{"AWS_BATCH_JOB_NUM_NODES", "2"}, {"AWS_BATCH_JOB_NODE_INDEX", "1"}},
     "got only AWS_BATCH_JOB_NUM_NODES=\"2\""},
    {"Azure Batch",
     {{"AZ_BATCH_NODE_LIST", "10.0.0.4;10.0.0.5"}, {"AZ_BATCH_HOST_LIST", "10.0.0.4,10.0.0.5"}},
     "got only AZ_BATCH_NODE_LIST=\"10.0.0.4;10.0.0.5\""},
    {"Azure Batch, one host", {{"AZ_BATCH_NODE_LIST", "10.0.0.4;"}}, "alone"},
    {"a Kubernetes service named master",
     {{"MASTER_PORT", "tcp://10.0.0.11:6379"}, {"MASTER_SERVICE_HOST", "10.0.0.11"}},
     "alone"},
    {"srun", kSlurm, "5 8 1 gpu07"},
    {"salloc's shell",
     {{"SLURM_JOB_ID", "4"}, {"SLURM_NTASKS", "4"}, {"SLURM_NNODES", "2"}},
     "alone"},
    {"salloc's shell in a step of its own",
     {{"SLURM_PROCID", "0"},
      {"SLURM_NTASKS", "4"},
      {"SLURM_STEP_ID", "4294967290"},
      {"PMI_RANK", "0"},
      {"PMI_SIZE", "1"},
      {"PMIX_RANK", "0"}},
     "alone"},
    {"mpirun in salloc's shell",
     with(
         kOpenMpi, {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_STEP_ID", "4294967290"}}),
     "1 2 1 127.0.0.1"},
    {"sbatch's script",
     {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "4"}},
     "expected srun to start the ranks, got the batch script itself, which SLURM runs once: "
     "SLURM_NTASKS is 4"},
    {"sbatch's script as a step",
     {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_STEP_ID", "4294967291"}},
     "SLURM_NTASKS is 4"},
    {"sbatch's script, hosts without tasks",
     {{"SLURM_PROCID", "0"}, {"SLURM_JOB_NUM_NODES", "2"}},
     "SLURM_JOB_NUM_NODES is 2"},
    {"sbatch's script of one task",
     {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_JOB_NODELIST", "n1"}},
     "0 1 - n1"},
    {"sbatch's script of one task, where a node may have several",
     {{"SLURM_PROCID", "0"},
      {"SLURM_NTASKS", "1"},
      {"SLURM_NTASKS_PER_NODE", "4"},
      {"SLURM_JOB_NODELIST", "n1"}},
     "0 1 - n1"},
    {"sbatch's script without tasks", {{"SLURM_PROCID", "0"}, {"SLURM_NNODES", "1"}}, "alone"},
    {"ddprun in sbatch's script",
     {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"RANK", "1"}, {"WORLD_SIZE", "2"}},
     "1 2 - -"},
};

}  // namespace

TEST_CASE("each engine's processes are numbered, or none of them trains", "[comm][pure][errors]") {
  for (const auto& engine : kEngines) {
    CAPTURE(engine.name);
    const bool is_text = engine.expected.size() > 30;
    const auto found = text_of(read(engine.variables));
    if (is_text || found.size() > 30) {
      CHECK_THAT(found, ContainsText(engine.expected));
    } else {
      CHECK(found == engine.expected);
    }
  }
}

TEST_CASE("a variable that shows a launcher is known", "[comm][pure]") {
  CHECK(name(read({{"RANK", "1"}}).sign) == "RANK");
  CHECK(name(read({{"WORLD_SIZE", "2"}}).sign) == "WORLD_SIZE");
  CHECK(name(read({{"MASTER_ADDR", "h"}}).sign) == "MASTER_ADDR");
  CHECK(name(read({{"FLUX_JOB_SIZE", "2"}}).sign) == "FLUX_JOB_SIZE");
  CHECK(read({{"FLUX_JOB_SIZE", "2"}}).rank_name == "FLUX_TASK_RANK");
  CHECK_FALSE(read({}).sign);
}

TEST_CASE("a long variable is shortened in the text", "[comm][pure][errors]") {
  std::string hosts = "a";
  for (int i = 0; i < 1000; ++i) hosts += ";a";
  const auto problem = read({{"AZ_BATCH_NODE_LIST", hosts}}).problem;
  CHECK_THAT(problem, ContainsText("a;a;...\", so there are 1001 processes or hosts"));
  CHECK(problem.size() < 700);
}

TEST_CASE("in Kubernetes hosts may get their names late", "[comm][pure]") {
  CHECK(read({{"KUBERNETES_SERVICE_HOST", "10.0.0.1"}}).names_come_late);
  CHECK_FALSE(read({}).names_come_late);
}
