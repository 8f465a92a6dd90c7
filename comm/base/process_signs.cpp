#include "base/process_signs.h"

#include <algorithm>
#include <charconv>

#include <ddp/internal/text.h>

namespace ddp {
namespace {

// How many processes or hosts a value names. 0: unknown.

/// "10.0.0.4;10.0.0.5" and "10.0.0.4,10.0.0.5".
int items_of(const std::string& value) {
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
int texts_in_arrays(const std::string& json) {
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

constexpr const char* kAzureRemedy =
    "Run mpirun ./train on the master node, or ddprun -n RANKS --nnodes NODES --node-rank R "
    "--rdzv-endpoint HOST0:29500 ./train on each node.";
constexpr const char* kClusterRemedy =
    "Run ddprun -n RANKS --nnodes HOSTS --node-rank R --rdzv-endpoint HOST0:29500 ./train on each "
    "host: the variable has their names, and this one's number.";
constexpr const char* kLsfRemedy =
    "Start it with mpirun or jsrun, or one ddprun a host by blaunch: ddprun -n RANKS --nnodes "
    "HOSTS --node-rank R --rdzv-endpoint HOST0:29500 ./train.";
constexpr const char* kPbsRemedy =
    "Start it with mpirun, or one ddprun a host by pbsdsh: ddprun -n RANKS --nnodes HOSTS "
    "--node-rank R --rdzv-endpoint HOST0:29500 ./train.";

constexpr SizeSign kSizeSigns[] = {
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

constexpr NumberSign kNumberSigns[] = {
    {"JOB_COMPLETION_INDEX", 1, true,
     "Run ddprun -n RANKS --nnodes PODS --node-rank $JOB_COMPLETION_INDEX --rdzv-endpoint "
     "POD0:29500 ./train in each pod, or ddprun -n 1 ./train where each pod trains for itself."},
    {"PMIX_RANK", 0, false,
     "Start it with a launcher that says how many ranks there are (ddprun, mpirun or srun), or set "
     "RANK and WORLD_SIZE."},
    {"LSF_PM_TASKID", 2, false, kLsfRemedy},
    {"PBS_TASKNUM", 2, false, kPbsRemedy},
    {"PBS_NODENUM", 1, false, kPbsRemedy},
};

std::string short_text(const std::string& value) {
  constexpr size_t kMost = 200;
  return value.size() <= kMost ? value : value.substr(0, kMost) + "...";
}

std::string problem_text(
    const Setting& found, const std::string& meaning, const std::string& remedy) {
  return ddp::str(
      "init_process_group: expected RANK and WORLD_SIZE, or those of another launcher, in the "
      "environment, got only ",
      found.name, "=\"", short_text(found.value), "\", so there are ", meaning, ". ", remedy);
}

std::string size_problem(const Lookup& lookup, const SizeSign& sign, int& most) {
  const auto found = read_variable(lookup, sign.variable);
  if (!found || (sign.beside != nullptr && !read_variable(lookup, sign.beside))) return "";
  const int count = sign.count(found->value);
  if (!sign.within_host) most = std::max(most, count);
  if (count <= 1) return "";
  return problem_text(*found, ddp::str(count, " processes or hosts"), sign.remedy);
}

}  // namespace

std::optional<Setting> read_variable(const Lookup& lookup, const std::string& name) {
  auto value = lookup(name);
  if (!value || value->empty()) return std::nullopt;
  return Setting{name, std::move(*value)};
}

int number_in(const std::string& value) {
  const auto begin = value.rfind(':') + 1;  // 0 without a colon
  int number = 0;
  const auto* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data() + begin, end, number);
  return error == std::errc() && (stop == end || *stop == '(') ? std::max(number, 0) : 0;
}

ProcessSigns read_process_signs(const Lookup& lookup) {
  ProcessSigns signs;
  int most = 0;
  for (const auto& sign : kSizeSigns) {
    signs.problem = size_problem(lookup, sign, most);
    if (!signs.problem.empty()) return signs;
  }
  if (most > 0) return signs;  // one says that there is one
  for (const auto& sign : kNumberSigns) {
    const auto found = read_variable(lookup, sign.variable);
    if (!found) continue;
    const int number = number_in(found->value);
    if (number >= sign.second) {
      signs.problem = problem_text(*found, "several processes or pods", sign.remedy);
      return signs;
    }
    if (sign.first_is_doubtful) {
      signs.doubt = ddp::str(
          "init_process_group: this process is a world of one rank, but with ", found->name, "=\"",
          found->value, "\" it may be the first of several that train alone. ", sign.remedy);
    }
  }
  return signs;
}

}  // namespace ddp
