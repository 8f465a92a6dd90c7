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
/// A process whose parent has died counts where this process is a subreaper
/// (PR_SET_CHILD_SUBREAPER): the kernel then makes it this one's child, whatever group or session
/// it has moved to.
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
/// \param limit  how long to wait for those that cannot die, in a device driver say.
/// \return those that were left.
std::vector<Process> kill_descendants(std::chrono::milliseconds limit);

}  // namespace ddp::launch
