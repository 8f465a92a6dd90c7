#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include <sys/types.h>

namespace ddp::launch {

struct Process {
  pid_t pid;
  pid_t parent;
  pid_t group;
};

/// Lists the processes below this one, children's children included, apart from zombies.
///
/// Where this process is a subreaper (PR_SET_CHILD_SUBREAPER), processes whose parent has died
/// count as well: the kernel makes them children of this one, whatever group or session they have
/// moved to.
///
/// Cost: one pass over /proc.
std::vector<Process> descendants();

/// Takes the wait status of a child.
///
/// \param options  of waitpid.
/// \return nothing when it has not ended yet, which only happens with WNOHANG.
/// \throws std::system_error  when there is no such child: no status must not pass for success.
std::optional<int> reap(pid_t child, int options);

/// Kills (SIGKILL) and reaps all descendants, again and again until none is left.
///
/// \param limit  how long to wait for processes that cannot die, such as in a device driver.
/// \return the processes that were left.
std::vector<Process> kill_descendants(std::chrono::milliseconds limit);

}  // namespace ddp::launch
