#pragma once

#include <optional>
#include <string>

namespace ddp::launch {

/// How many cores the CPU quotas of a process's control groups add up to, rounded down, at least 1;
/// nothing if none of them, nor of those above, has a quota. A container shows all cores of its
/// host and stops its threads once they have used its share of the time.
///
/// \param groups  the text of /proc/self/cgroup, of version 1 or 2.
/// \param mount  where the control groups are: /sys/fs/cgroup.
std::optional<int> cores_of_quota(const std::string& groups, const std::string& mount);

}  // namespace ddp::launch
