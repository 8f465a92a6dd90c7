#pragma once

#include <functional>

namespace ddp::launch {

/// Runs `job` in a child process and sees to it that no process of the job outlives either.
///
/// Two processes watch over each other, so that nothing short of killing both at once leaves an
/// orphan behind. This one, whose id the user sees, passes the awaited signals on to the job and
/// waits for it; when the job's process dies, however, all that it has started becomes this one's
/// child (PR_SET_CHILD_SUBREAPER) and is killed. The job in turn reads from `lifeline`, which ends
/// when this process dies, be it from SIGKILL, and is a subreaper as well. It has a session and a
/// name of its own, and so is not hit by what kills this process's group or all of its name.
///
/// Must be called while the process has one thread.
///
/// \param job  gets the lifeline's descriptor; its result is its process's exit code.
/// \return the job's exit code; 128 + the signal's number if its process was killed.
/// \throws std::system_error  when no process can be started.
int run_guarded(const std::function<int(int lifeline)>& job);

}  // namespace ddp::launch
