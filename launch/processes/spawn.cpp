#include "launch/processes/spawn.h"

#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "launch/pipe.h"
#include "launch/processes/signals.h"
#include "launch/texts.h"

namespace ddp::launch {
namespace {

std::vector<char*> pointers_to(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  // exec's signature lacks a const; it modifies none of the strings.
  for (const std::string& s : strings) result.push_back(const_cast<char*>(s.c_str()));
  result.push_back(nullptr);
  return result;
}

/// Undoes the blocking and ignoring of signals in ddprun, so that the ranks do not inherit it.
void restore_signals() {
  struct sigaction by_default = {};
  by_default.sa_handler = SIG_DFL;
  for (int signal = 1; signal <= SIGRTMAX; ++signal) {
    if (is_ignored_by_caller(signal)) continue;
    ::sigaction(signal, &by_default, nullptr);  // fails for SIGKILL, SIGSTOP and libc's own
  }
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

/// Makes the child of a fork the leader of a session that ends with its parent.
void prepare_child(const StandardFds& fds, pid_t parent) {
  ::setsid();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // If the parent died before the line above, the kernel sends no signal for it.
  if (::getppid() != parent) ::_exit(1);
  ::dup2(fds.in, STDIN_FILENO);
  ::dup2(fds.out, STDOUT_FILENO);
  ::dup2(fds.err, STDERR_FILENO);
}

/// Runs the child from fork to exec: system calls only.
[[noreturn]] void exec_in_child(
    char** command, char** environment, const StandardFds& fds, pid_t parent, int error_fd) {
  prepare_child(fds, parent);
  restore_signals();
  ::execvpe(command[0], command, environment);
  const int error = errno;
  const ssize_t written = ::write(error_fd, &error, sizeof(error));
  ::_exit(written == sizeof(error) ? 127 : 126);
}

pid_t checked_fork() {
  const pid_t pid = ::fork();
  if (pid >= 0) return pid;
  throw_errno(
      errno == EAGAIN ? "cannot start a process: raise `ulimit -u`, or its container's pids.max"
                      : "cannot start a process");
}

/// Explains ENOENT of a file that exists: the interpreter in a script's first line does not.
std::string fault_of_first_line(const std::string& script) {
  std::string line;
  if (!std::getline(std::ifstream(script), line) || line.compare(0, 2, "#!") != 0) return "";
  const bool ends_as_on_windows = line.back() == '\r';
  if (ends_as_on_windows) line.pop_back();
  return ". It is there, and its first line asks for an interpreter that is not: '" + line + "'" +
         (ends_as_on_windows ? ", which ends with a carriage return. Save it with line ends of "
                               "Unix (sed -i 's/\\r$//' " +
                                   script + ")"
                             : "");
}

}  // namespace

CannotExecute::CannotExecute(const std::string& program, int error)
    : std::runtime_error(
          "cannot execute '" + program + "': " + std::strerror(error) +
          (error == ENOENT ? fault_of_first_line(program) : "")),
      exit_code_(error == ENOENT ? 127 : 126) {}

pid_t spawn(
    const std::vector<std::string>& command, const Environment& environment,
    const StandardFds& fds) {
  auto arguments = pointers_to(command);
  auto variables = pointers_to(environment);
  Pipe exec_error = make_pipe();  // a successful exec closes it
  const pid_t parent = ::getpid();

  // Not posix_spawn: it can neither set the parent-death signal nor check for its race.
  const pid_t pid = checked_fork();
  if (pid == 0) {
    exec_in_child(arguments.data(), variables.data(), fds, parent, exec_error.write.get());
  }
  exec_error.write.reset();
  int error = 0;
  const ssize_t got = TEMP_FAILURE_RETRY(::read(exec_error.read.get(), &error, sizeof(error)));
  if (got != sizeof(error)) return pid;
  ::waitpid(pid, nullptr, 0);
  if (error == EAGAIN || error == ENOMEM || error == EMFILE || error == ENFILE) {
    throw std::system_error(error, std::generic_category(), "cannot start a process");
  }
  throw CannotExecute(command.front(), error);
}

pid_t fork_process(const std::function<void()>& run, const StandardFds& fds) {
  const pid_t parent = ::getpid();
  const pid_t pid = checked_fork();
  if (pid != 0) return pid;
  prepare_child(fds, parent);
  run();
  ::_exit(1);
}

}  // namespace ddp::launch
