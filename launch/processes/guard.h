#pragma once

#include <functional>
#include <vector>

#include "launch/processes/process_tree.h"

namespace ddp::launch {

/// How a guarded job has ended.
struct GuardedEnd {
  int status;                 // the wait status of the process that ran it
  std::vector<Process> left;  // processes that SIGKILL has not ended yet
};

/// Runs the job in a child process and makes sure that no process of the job outlives either
/// process.
///
/// Two processes watch each other, so that an orphan is left only if both are killed at once. This
/// process forwards the awaited signals to the job and waits for it. When the job's process dies,
/// the processes that it started become children of this one (PR_SET_CHILD_SUBREAPER) and are
/// killed. The job reads from a lifeline, which ends when this process dies, even from SIGKILL; the
/// job is a subreaper, too. It has a session and a name of its own, so a kill of this process's
/// group or of its name does not reach it.
///
/// Must be called while the process has one thread. All of its children are the job's.
///
/// \param supervise  runs the job in the child, and returns its exit code. Gets the lifeline, and
///        throws nothing.
/// \throws std::system_error  when no process can be started.
GuardedEnd run_guarded(const std::function<int(int lifeline)>& supervise);

}  // namespace ddp::launch
