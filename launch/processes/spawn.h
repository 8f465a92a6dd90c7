#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <sys/types.h>

#include "launch/environment.h"

namespace ddp::launch {

/// Thrown when the program cannot be executed; carries ddprun's exit code for that.
class CannotExecute : public std::runtime_error {
 public:
  CannotExecute(const std::string& program, int error);
  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

/// The descriptors that become a program's stdin, stdout and stderr.
struct StandardFds {
  int in;
  int out;
  int err;
};

/// Starts a program as the leader of a new session, and so of a new process group.
///
/// The group lets a signal reach all processes that the program starts. The session keeps a
/// terminal's Ctrl-C from reaching it twice, and lets it use the terminal although it is not in the
/// foreground. The program begins with default signal handling (but for the signals that
/// `is_ignored_by_caller`), and the kernel kills it when the calling thread dies.
///
/// \param command  the program, looked up in PATH as execvp does, and its arguments; not empty.
/// \return its process id; the program is then running: its exec has succeeded.
/// \throws CannotExecute  when there is no such program, or no permission, ...
/// \throws std::system_error  when the system is out of processes or descriptors.
pid_t spawn(
    const std::vector<std::string>& command, const Environment& environment,
    const StandardFds& fds);

/// Starts a copy of this process as spawn() starts a program, but for its signals and descriptors,
/// which stay as they are here.
///
/// \param run  what the copy does; does not return.
/// \throws std::system_error  when the system is out of processes.
pid_t fork_process(const std::function<void()>& run, const StandardFds& fds);

}  // namespace ddp::launch
