// Defaults and notes that ddprun takes from an engine's variables.
#include "launch/engine.h"

#include <chrono>
#include <string>
#include <vector>

#include "launch/parse.h"

#include "support/catch.h"

using namespace std::chrono_literals;
using ddp::launch::is_same_job;
using ddp::testing::Parse;
using ddp::testing::PetVariables;
using Words = std::vector<std::string>;

namespace {

constexpr const char* kAlone = "";

/// A process's variables, and how the note begins that ddprun makes there; "": it makes none.
struct Place {
  const char* name;
  PetVariables variables;
  std::string note;
};

const PetVariables kTask{
    {"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_STEP_ID", "0"}, {"SLURM_NNODES", "2"}};

PetVariables with(PetVariables variables, const PetVariables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

const Place kPlaces[] = {
    {"nothing", {}, kAlone},
    {"by hand", {{"RANK", "1"}, {"WORLD_SIZE", "2"}}, "WORLD_SIZE=2: this is one of 2 processes"},
    {"by hand, one", {{"RANK", "0"}, {"WORLD_SIZE", "1"}}, kAlone},
    {"a number alone", {{"RANK", "1"}}, kAlone},
    {"a script's own WORLD_SIZE", {{"WORLD_SIZE", "8"}}, kAlone},
    {"mpirun",
     {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}},
     "OMPI_COMM_WORLD_SIZE=2: this is one of 2 processes"},
    {"mpirun of one", {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}, kAlone},
    {"mpirun of one in sbatch's script",
     {{"OMPI_COMM_WORLD_RANK", "0"},
      {"OMPI_COMM_WORLD_SIZE", "1"},
      {"SLURM_PROCID", "0"},
      {"SLURM_NTASKS", "4"}},
     kAlone},
    {"MPICH's mpiexec",
     {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}},
     "PMI_SIZE=2: "},
    {"Horovod", {{"HOROVOD_RANK", "1"}, {"HOROVOD_SIZE", "2"}}, "HOROVOD_SIZE=2: "},
    {"Flux", {{"FLUX_TASK_RANK", "1"}, {"FLUX_JOB_SIZE", "2"}}, "FLUX_JOB_SIZE=2: "},
    {"jsrun", {{"JSM_NAMESPACE_RANK", "1"}, {"JSM_NAMESPACE_SIZE", "2"}}, "JSM_NAMESPACE_SIZE=2: "},
    {"PALS with PMIx",
     {{"PALS_RANKID", "1"}, {"PMIX_RANK", "1"}},
     "PMIX_RANK=1: there are several"},
    {"PRRTE's first, which may be the only one", {{"PMIX_RANK", "0"}}, kAlone},
    {"srun", kTask, "SLURM_NTASKS=2: this is one of 2 processes"},
    {"srun's first task", with(kTask, {{"SLURM_PROCID", "0"}}), "SLURM_NTASKS=2: "},
    {"srun with several tasks on one node",
     with(kTask, {{"SLURM_NNODES", "1"}, {"SLURM_JOB_NUM_NODES", "1"}}), "SLURM_NTASKS=2: "},
    {"srun -n1", with(kTask, {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}}), kAlone},
    {"salloc's shell",
     {{"SLURM_JOB_ID", "4"}, {"SLURM_NTASKS", "4"}, {"SLURM_NNODES", "1"}},
     kAlone},
    {"salloc's shell in a step of its own",
     {{"SLURM_PROCID", "0"},
      {"SLURM_NTASKS", "4"},
      {"SLURM_STEP_ID", "4294967290"},
      {"PMI_RANK", "0"},
      {"PMI_SIZE", "4"},
      {"PMIX_RANK", "0"}},
     kAlone},
    {"srun in salloc's shell, which has a terminal", with(kTask, {{"SLURM_PTY_PORT", "4000"}}),
     "SLURM_NTASKS=2: "},
    {"the shell of srun -n 4 --pty",
     with(kTask, {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_PTY_PORT", "4000"}}),
     kAlone},
    {"mpirun in salloc's shell",
     {{"SLURM_PROCID", "0"},
      {"SLURM_STEP_ID", "4294967290"},
      {"OMPI_COMM_WORLD_RANK", "1"},
      {"OMPI_COMM_WORLD_SIZE", "2"}},
     "OMPI_COMM_WORLD_SIZE=2: "},
    {"sbatch -n 4's script",
     {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_JOB_NUM_NODES", "1"}},
     kAlone},
    {"sbatch's script as a step",
     {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_STEP_ID", "4294967291"}},
     kAlone},
    {"sbatch's script of two nodes, which runs once",
     {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_JOB_NUM_NODES", "2"}},
     kAlone},
    {"indexed Job", {{"JOB_COMPLETION_INDEX", "1"}}, "JOB_COMPLETION_INDEX=1: there are several"},
    {"indexed Job's first pod, which may be the only one", {{"JOB_COMPLETION_INDEX", "0"}}, kAlone},
    {"LSF's blaunch",
     {{"LSB_DJOB_NUMPROC", "2"}, {"LSF_PM_TASKID", "1"}},
     "LSB_DJOB_NUMPROC=2: there are 2 processes or hosts"},
    {"LSF's script", {{"LSB_JOBID", "7"}, {"LSB_DJOB_NUMPROC", "2"}}, kAlone},
    {"PBS' pbsdsh", {{"PBS_TASKNUM", "2"}, {"PBS_NODENUM", "1"}}, "PBS_TASKNUM=2: "},
    {"PBS' script", {{"PBS_TASKNUM", "1"}, {"PBS_NODENUM", "0"}}, kAlone},
    {"SageMaker", {{"SM_HOSTS", R"(["a","b"])"}}, R"(SM_HOSTS=["a","b"]: there are 2 processes)"},
    {"SageMaker, one host", {{"SM_HOSTS", R"(["a"])"}}, kAlone},
    {"SkyPilot", {{"SKYPILOT_NUM_NODES", "2"}}, "SKYPILOT_NUM_NODES=2: "},
    {"AWS Batch", {{"AWS_BATCH_JOB_NUM_NODES", "2"}}, "AWS_BATCH_JOB_NUM_NODES=2: "},
    {"Azure Batch", {{"AZ_BATCH_NODE_LIST", "a;b"}}, "AZ_BATCH_NODE_LIST=a;b: "},
    {"Vertex", {{"CLUSTER_SPEC", R"({"cluster":{"a":["x","y"]}})"}}, "CLUSTER_SPEC={"},
    {"ranks of a TrainJob's pod", {{"PET_NPROC_PER_NODE", "4"}}, kAlone},
};

}  // namespace

TEST_CASE("ddprun says where it is one of several that know nothing of each other", "[pure]") {
  for (const auto& place : kPlaces) {
    const Parse parse({"-n", "2", "p"}, place.variables);
    CAPTURE(place.name, parse.err);
    REQUIRE(parse.accepted);
    CHECK(parse.options.nodes == 1);
    if (place.note.empty()) {
      CHECK(parse.err.empty());
      continue;
    }
    CHECK_THAT(
        parse.err, Catch::Matchers::StartsWith("ddprun: " + place.note) &&
                       ContainsText("each ddprun makes a world of its own. ") &&
                       ContainsText("Where this host alone is meant, give --standalone.\n"));
    CHECK(parse.err.find('\n') == parse.err.size() - 1);
  }
  CHECK_THAT(
      Parse({"-n", "2", "p"}, kTask).err,
      ContainsText("--nnodes 2 --node-rank $SLURM_PROCID --rdzv-endpoint HOST0:29500"));
}

TEST_CASE("a ddprun that was told of the hosts says nothing of them", "[pure]") {
  const std::vector<Words> lines = {
      {"--standalone", "-n", "2"},
      {"--nnodes", "1", "-n", "2"},
      {"--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "h:1", "-n", "2"},
      {"-H", "a,b"},
      {"--obey-stdin", "-n", "2"},
      {"--elastic", "--coordinator", "h:1/t", "-n", "2"}};
  for (auto words : lines) {
    words.push_back("p");
    const Parse parse(words, kTask);
    CAPTURE(words, parse.err);
    REQUIRE(parse.accepted);
    CHECK(parse.err.empty());
  }
  const std::vector<PetVariables> told = {
      {{"PET_STANDALONE", "1"}}, {{"PET_NNODES", "1"}}, {{"PET_NODE_RANK", "0"}}};
  for (const auto& variables : told) {
    CHECK(Parse({"-n", "2", "p"}, with(kTask, variables)).err.empty());
  }
  CHECK(Parse({"--coordinate", "29600", "--max-ranks", "8"}, kTask).err.empty());
  // Not of the hosts.
  CHECK_FALSE(Parse({"p"}, with(kTask, {{"PET_NPROC_PER_NODE", "2"}})).err.empty());
}

TEST_CASE("in Kubernetes hosts wait longer for each other by default", "[pure]") {
  const Words line = {"-n", "2", "--nnodes", "2", "--rdzv-endpoint", "h:1", "--max-restarts", "1"};
  const auto join_timeout = [&](Words more, const PetVariables& variables) {
    more.insert(more.begin(), line.begin(), line.end());
    more.push_back("p");
    return Parse(more, variables).options.join_timeout;
  };
  const PetVariables pod{{"KUBERNETES_SERVICE_HOST", "10.96.0.1"}};
  CHECK(join_timeout({}, {}) == 300s);
  CHECK(join_timeout({}, pod) == 1800s);
  CHECK(join_timeout({}, {{"KUBERNETES_SERVICE_HOST", ""}}) == 300s);
  CHECK(join_timeout({"--rdzv-conf", "join_timeout=60"}, pod) == 60s);
  CHECK(join_timeout({}, with(pod, {{"PET_RDZV_CONF", "join_timeout=70"}})) == 70s);
}

TEST_CASE("the hosts of a job have its number in the engine as their id", "[pure]") {
  const auto id = [](const PetVariables& variables, const Words& more = {}) {
    Words words = {"-n", "2", "--nnodes", "2", "--rdzv-endpoint", "h:1", "--max-restarts", "1"};
    words.insert(words.end(), more.begin(), more.end());
    words.push_back("p");
    return Parse(words, variables).options.job_id;
  };
  const PetVariables slurm{{"SLURM_JOB_ID", "42"}};
  CHECK(id({}).empty());
  CHECK(id(slurm) == "SLURM_JOB_ID=42");
  CHECK(id({{"LSB_JOBID", "7"}, {"LSB_JOBINDEX", "3"}}) == "LSB_JOBID=7.3");
  CHECK(id({{"PBS_JOBID", "7[1].server"}}) == "PBS_JOBID=7[1].server");
  CHECK(id({{"FLUX_JOB_ID", "f1"}}) == "FLUX_JOB_ID=f1");
  CHECK(id({{"JOB_ID", "7"}}).empty());
  CHECK(id({{"PBS_JOBID", "a b"}}).empty());
  // The components of a heterogeneous job have a number each.
  const PetVariables second{{"SLURM_JOB_ID", "43"}, {"SLURM_HET_SIZE", "2"}};
  CHECK(id(second).empty());
  CHECK(id(with(second, {{"SLURM_JOB_ID_HET_GROUP_0", "42"}})) == "SLURM_JOB_ID_HET_GROUP_0=42");
  // Hosts of an elastic job may come from two jobs of the engine.
  CHECK(id(slurm, {"--elastic"}).empty());
  CHECK(id(slurm, {"--rdzv-id", "own"}) == "own");
  CHECK(Parse({"-H", "a,b", "--max-restarts", "1", "p"}, slurm).options.job_id.empty());
  CHECK(Parse({"-n", "2", "p"}, slurm).options.job_id.empty());
}

TEST_CASE("ids of one job are equal, or one is unknown and the other the engine's", "[pure]") {
  CHECK(is_same_job("a", "a"));
  CHECK_FALSE(is_same_job("a", "b"));
  CHECK_FALSE(is_same_job("SLURM_JOB_ID=1", "SLURM_JOB_ID=2"));
  CHECK(is_same_job("job", "SLURM_JOB_ID=1"));
  CHECK(is_same_job("PBS_JOBID=1", "job"));
  CHECK_FALSE(is_same_job("job", "a"));
  CHECK_FALSE(is_same_job("a", "job"));
  CHECK_FALSE(is_same_job("job", "SLURM_JOB_IDS=1"));
}
