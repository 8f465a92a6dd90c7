#include "launch/core_quota.h"

#include <algorithm>
#include <fstream>
#include <sstream>

namespace ddp::launch {
namespace {

/// The quota of one group, in cores: a file of version 2, "max 100000" or "150000 100000", or two
/// of version 1, of which the first says -1 for none.
std::optional<double> quota_in(const std::string& folder, bool is_second_version) {
  double quota = 0, period = 0;
  std::ifstream first(folder + (is_second_version ? "/cpu.max" : "/cpu.cfs_quota_us"));
  first >> quota;
  std::ifstream second(folder + "/cpu.cfs_period_us");
  (is_second_version ? first : second) >> period;
  return quota > 0 && period > 0 ? std::optional<double>(quota / period) : std::nullopt;
}

bool names_cpu(const std::string& controllers) {
  return (',' + controllers + ',').find(",cpu,") != std::string::npos;
}

}  // namespace

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

}  // namespace ddp::launch
