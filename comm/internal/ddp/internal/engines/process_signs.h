// Other processes or hosts of a job, of which no launcher speaks. Without LibTorch, for ddprun
// looks for them, too.
#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include <ddp/internal/engines/variables.h>
#include <ddp/internal/text.h>

namespace ddp::engines {

/// Remedy for the PET_* variables, by which Kubeflow gives torchrun its options.
inline constexpr const char* kDdprunTakesPet =
    "Run ddprun ./train in each pod: it takes the PET_* variables as its options.";

// How many processes or hosts a value names. 0: unknown.

/// "10.0.0.4;10.0.0.5" and "10.0.0.4,10.0.0.5".
inline int items_of(const std::string& value) {
  int items = 0;
  bool in_item = false;
  for (const char c : value) {
    const bool separates = c == ',' || c == ';';
    if (!separates && !in_item) ++items;
    in_item = !separates;
  }
  return items;
}

/// The texts in JSON's arrays: of those in "cluster", if there is such an object.
inline int texts_in_arrays(const std::string& json) {
  const auto cluster = json.find("\"cluster\"");
  const bool has_cluster = cluster != std::string::npos;
  int texts = 0, arrays = 0, objects = 0;
  bool in_text = false;
  for (auto at = has_cluster ? cluster + 9 : 0; at < json.size(); ++at) {
    const char c = json[at];
    if (in_text) {
      if (c == '\\') ++at;
      if (c == '"') in_text = false;
      continue;
    }
    in_text = c == '"';
    if (in_text && arrays > 0) ++texts;
    arrays += c == '[' ? 1 : c == ']' ? -1 : 0;
    objects += c == '{' ? 1 : c == '}' ? -1 : 0;
    if (has_cluster && c == '}' && objects == 0) break;
  }
  return texts;
}

/// A variable by which a system says how many processes or hosts there are, but not, in a way that
/// fits ranks, which of them this is.
struct SizeSign {
  const char* variable;
  int (*count)(const std::string& value);
  const char* beside;  // counts only where this one is set; nullptr: always
  const char* remedy;
  bool within_host = false;  // says nothing of other hosts
};

inline constexpr const char* kAzureRemedy =
    "Run mpirun ./train on the master node, or ddprun -n RANKS --nnodes NODES --node-rank R "
    "--rdzv-endpoint HOST0:29500 ./train on each node.";
inline constexpr const char* kClusterRemedy =
    "Run ddprun -n RANKS --nnodes HOSTS --node-rank R --rdzv-endpoint HOST0:29500 ./train on each "
    "host: the variable has their names, and this one's number.";
inline constexpr const char* kLsfRemedy =
    "Start it with mpirun or jsrun, or one ddprun a host by blaunch: ddprun -n RANKS --nnodes "
    "HOSTS --node-rank R --rdzv-endpoint HOST0:29500 ./train.";
inline constexpr const char* kPbsRemedy =
    "Start it with mpirun, or one ddprun a host by pbsdsh: ddprun -n RANKS --nnodes HOSTS "
    "--node-rank R --rdzv-endpoint HOST0:29500 ./train.";

inline constexpr SizeSign kSizeSigns[] = {
    {"PET_NNODES", number_in, nullptr, kDdprunTakesPet},
    {"PET_NPROC_PER_NODE", number_in, nullptr, kDdprunTakesPet, true},
    {"LSB_DJOB_NUMPROC", number_in, "LSF_PM_TASKID", kLsfRemedy},
    {"SM_HOSTS", texts_in_arrays, nullptr,
     "Run ddprun -n RANKS --nnodes HOSTS --node-rank R --rdzv-endpoint algo-1:29500 ./train on "
     "each "
     "host, where R is the place of SM_CURRENT_HOST in that list, from 0."},
    {"SKYPILOT_NUM_NODES", number_in, nullptr,
     "Run ddprun -n RANKS --nnodes $SKYPILOT_NUM_NODES --node-rank $SKYPILOT_NODE_RANK "
     "--rdzv-endpoint $(echo \"$SKYPILOT_NODE_IPS\" | head -n 1):29500 ./train."},
    {"AWS_BATCH_JOB_NUM_NODES", number_in, nullptr,
     "Run ddprun -n RANKS --nnodes $AWS_BATCH_JOB_NUM_NODES --node-rank $AWS_BATCH_JOB_NODE_INDEX "
     "--rdzv-endpoint HOST0:29500 ./train, where HOST0 is the main node, with index 0."},
    {"AZ_BATCH_NODE_LIST", items_of, nullptr, kAzureRemedy},
    {"AZ_BATCH_HOST_LIST", items_of, nullptr, kAzureRemedy},
    {"CLUSTER_SPEC", texts_in_arrays, nullptr, kClusterRemedy},
    {"TF_CONFIG", texts_in_arrays, nullptr, kClusterRemedy},
};

/// A variable that numbers this process or its host, where none says how many there are.
struct NumberSign {
  const char* variable;
  int second;  // a process with this number or a higher one is not alone
  bool first_is_doubtful;
  const char* remedy;
};

inline constexpr NumberSign kNumberSigns[] = {
    {"JOB_COMPLETION_INDEX", 1, true,
     "Run ddprun -n RANKS --nnodes PODS --node-rank $JOB_COMPLETION_INDEX --rdzv-endpoint "
     "POD0:29500 ./train in each pod, or ddprun --standalone -n 1 ./train where each pod trains "
     "for itself."},
    {"PMIX_RANK", 0, false,
     "Start it with a launcher that says how many ranks there are (ddprun, mpirun or srun), or set "
     "RANK and WORLD_SIZE."},
    {"LSF_PM_TASKID", 2, false, kLsfRemedy},
    {"PBS_TASKNUM", 2, false, kPbsRemedy},
    {"PBS_NODENUM", 1, false, kPbsRemedy},
};

/// A variable that says so, and what to do.
struct ProcessSign {
  Setting found;
  std::string meaning;  // "2 processes or hosts"
  const char* remedy;   // a sentence
};

struct ProcessSigns {
  std::optional<ProcessSign> certain;   // there are some
  std::optional<ProcessSign> doubtful;  // there may be some
};

/// Looks for variables by which a system that runs one command on several hosts or pods says so.
///
/// Such a command is meant to be a launcher. A program in its place would train alone on each of
/// them, and all would write to one folder.
inline ProcessSigns find_process_signs(const Lookup& lookup) {
  ProcessSigns signs;
  int most = 0;
  for (const auto& sign : kSizeSigns) {
    auto found = read_variable(lookup, sign.variable);
    if (!found || (sign.beside != nullptr && !read_variable(lookup, sign.beside))) continue;
    const int count = sign.count(found->value);
    if (!sign.within_host) most = std::max(most, count);
    if (count <= 1) continue;
    signs.certain = {std::move(*found), str(count, " processes or hosts"), sign.remedy};
    return signs;
  }
  if (most > 0) return signs;  // one says that there is one
  for (const auto& sign : kNumberSigns) {
    auto found = read_variable(lookup, sign.variable);
    if (!found) continue;
    if (number_in(found->value) >= sign.second) {
      signs.certain = {std::move(*found), "several processes or pods", sign.remedy};
      return signs;
    }
    if (sign.first_is_doubtful) signs.doubtful = {std::move(*found), "", sign.remedy};
  }
  return signs;
}

}  // namespace ddp::engines
