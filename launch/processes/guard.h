#pragma once

#include <functional>

namespace ddp::launch {

/// Runs `job` in a child process and makes sure that no process of the job outlives either process.
///
/// Two processes watch each other, so that an orphan is left only if both are killed at once. This
/// process, whose id the user sees, forwards the awaited signals to the job and waits for it. When
/// the job's process dies, the processes that it started become children of this one
/// (PR_SET_CHILD_SUBREAPER) and are killed. The job reads from `lifeline`, which ends when this
/// process dies, even from SIGKILL; the job is a subreaper, too. It has a session and a name of its
/// own, so a kill of this process's group or of its name does not reach it.
///
/// Must be called while the process has one thread.
///
/// \param job  gets the lifeline's descriptor; its result is its process's exit code.
/// \return the job's exit code; 128 + the signal's number if its process was killed.
/// \throws std::system_error  when no process can be started.
int run_guarded(const std::function<int(int lifeline)>& job);

}  // namespace ddp::launch
