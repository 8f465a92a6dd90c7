#include "launch/environment.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <memory>
#include <numeric>
#include <sstream>
#include <string_view>
#include <utility>

#include <dirent.h>
#include <sched.h>
#include <unistd.h>

#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "launch/texts.h"

namespace ddp::launch {
namespace {

/// Reads the quota of one group, in cores: a file of version 2, "max 100000" or "150000 100000", or
/// two files of version 1; "max" and -1 mean none.
std::optional<double> quota_in(const std::string& folder, bool is_second_version) {
  double quota = 0, period = 0;
  std::ifstream first(folder + (is_second_version ? "/cpu.max" : "/cpu.cfs_quota_us"));
  first >> quota;
  std::ifstream second(folder + "/cpu.cfs_period_us");
  (is_second_version ? first : second) >> period;
  return quota > 0 && period > 0 ? std::optional<double>(quota / period) : std::nullopt;
}

constexpr const char* kPretend = "DDP_PRETEND=";
constexpr const char* kCallsFolder = "DDP_CALLS_DIR=";

/// A rank's host among the others, as the rank is told.
struct PlaceOfRank {
  int local_rank, local_ranks;
  int node, nodes;
};

PlaceOfRank place_of_rank(const LaunchOptions& options, int local_rank) {
  if (!options.pretended) {
    return {local_rank, options.local_ranks, options.node_rank, options.nodes};
  }
  const auto& world = *options.pretended;
  const int rank = global_rank(options, local_rank), a_host = world.ranks_a_host;
  const int node = rank / a_host, nodes = (world.size + a_host - 1) / a_host;
  return {rank % a_host, std::min(a_host, world.size - node * a_host), node, nodes};
}

bool names_cpu(const std::string& controllers) {
  return (',' + controllers + ',').find(",cpu,") != std::string::npos;
}

}  // namespace

std::string omp_threads(
    const LaunchOptions& options, const std::optional<std::string>& inherited, int cores) {
  if (options.omp_threads) return std::to_string(*options.omp_threads);
  if (inherited) return *inherited;
  return std::to_string(std::max(1, cores / options.local_ranks));
}

int ranks_of_node(const LaunchOptions& options, int node) {
  const auto& all = options.ranks_of_nodes;
  return all.empty() ? options.local_ranks : all.at(static_cast<size_t>(node));
}

int global_rank(const LaunchOptions& options, int local_rank) {
  if (options.pretended) return options.pretended->present.at(static_cast<size_t>(local_rank));
  int rank = local_rank;
  for (int node = 0; node < options.node_rank; ++node) rank += ranks_of_node(options, node);
  return rank;
}

int world_size(const LaunchOptions& options) {
  if (options.pretended) return options.pretended->size;
  if (options.ranks_of_nodes.empty()) return options.nodes * options.local_ranks;
  return std::accumulate(options.ranks_of_nodes.begin(), options.ranks_of_nodes.end(), 0);
}

Environment rank_environment(
    const Environment& inherited, const LaunchOptions& options, const Attempt& attempt,
    int local_rank, const std::string& omp_threads) {
  const PlaceOfRank place = place_of_rank(options, local_rank);
  const std::pair<std::string, std::string> own[] = {
      {"RANK=", std::to_string(global_rank(options, local_rank))},
      {"WORLD_SIZE=", std::to_string(world_size(options))},
      {"LOCAL_RANK=", std::to_string(place.local_rank)},
      {"LOCAL_WORLD_SIZE=", std::to_string(place.local_ranks)},
      {"GROUP_RANK=", std::to_string(place.node)},
      {"GROUP_WORLD_SIZE=", std::to_string(place.nodes)},
      {"MASTER_ADDR=", options.master_addr},
      {"MASTER_PORT=", std::to_string(attempt.master_port)},
      {"TORCHELASTIC_RESTART_COUNT=", std::to_string(attempt.number)},
      {"TORCHELASTIC_MAX_RESTARTS=", std::to_string(options.max_restarts)},
      {"OMP_NUM_THREADS=", omp_threads},
  };
  Environment result;
  for (const std::string& entry : inherited) {
    const bool replaced = std::any_of(std::begin(own), std::end(own), [&](const auto& pair) {
      return begins_with(entry, pair.first);
    });
    const bool is_stale = begins_with(entry, "TORCHELASTIC_") || begins_with(entry, kPretend);
    if (!replaced && !is_stale) result.push_back(entry);
  }
  for (const auto& [name, value] : own) result.push_back(name + value);
  if (options.pretended) {
    result.push_back(str(kPretend, joined_by(",", options.pretended->present)));
  }
  if (!options.calls.folder.empty()) {
    drop_if(result, [](const std::string& entry) { return begins_with(entry, kCallsFolder); });
    result.push_back(kCallsFolder + options.calls.folder);
  }
  return result;
}

Environment current_environment() {
  Environment result;
  for (char** entry = ::environ; entry != nullptr && *entry != nullptr; ++entry) {
    result.emplace_back(*entry);
  }
  return result;
}

std::optional<int> cores_of_quota(const std::string& groups, const std::string& mount) {
  std::optional<double> least;
  std::istringstream lines(groups);
  for (std::string line; std::getline(lines, line);) {  // "4:cpu,cpuacct:/a/b", or "0::/a/b"
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const auto controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && !names_cpu(controllers)) continue;
    const auto top = controllers.empty() ? mount : mount + '/' + controllers;
    // The quotas of groups above count, too. In a container the path may be the host's, which is
    // not there.
    auto path = line.substr(second + 1);
    while (true) {
      if (const auto cores = quota_in(top + path, controllers.empty())) {
        least = std::min(least.value_or(*cores), *cores);
      }
      if (path.empty()) break;
      path.resize(path.find_last_of('/') == std::string::npos ? 0 : path.find_last_of('/'));
    }
  }
  if (!least) return std::nullopt;
  return std::max(1, static_cast<int>(*least));
}

int usable_cores() {
  cpu_set_t cores;
  // Fails on machines with more cores than a cpu_set_t has bits.
  const bool has_set = ::sched_getaffinity(0, sizeof(cores), &cores) == 0;
  const int allowed =
      has_set ? CPU_COUNT(&cores) : static_cast<int>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
  std::ostringstream groups;
  groups << std::ifstream("/proc/self/cgroup").rdbuf();
  return std::min(allowed, cores_of_quota(groups.str(), "/sys/fs/cgroup").value_or(allowed));
}

int usable_gpus(const std::string& devices, const std::optional<std::string>& visible) {
  constexpr std::string_view kName = "nvidia";  // nvidia0; nvidiactl is none
  int count = 0;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir(devices.c_str()), ::closedir);
  while (const dirent* entry = folder ? ::readdir(folder.get()) : nullptr) {
    const std::string_view name = entry->d_name;
    const auto number = name.substr(std::min(name.size(), kName.size()));
    const bool is_number = !number.empty() && all_of(number, [](char c) {
      return std::isdigit(static_cast<unsigned char>(c));
    });
    if (begins_with(name, kName) && is_number) ++count;
  }
  if (!visible) return count;
  int named = 0;
  // Parts of a GPU (MIG-...) are more than there are files.
  bool has_parts = false;
  for (const auto& one : split(*visible, ',')) {
    if (one.empty() || one.front() == '-') break;
    has_parts = has_parts || begins_with(one, "MIG-");
    ++named;
  }
  return count > 0 && has_parts ? named : std::min(count, named);
}

}  // namespace ddp::launch
