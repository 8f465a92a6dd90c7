#include "profiler/stacks/program_output.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>

#include <ddp/internal/system/fd.h>
#include <ddp/internal/text.h>

namespace ddp::profiling {
namespace {

using Clock = std::chrono::steady_clock;

// Not fork(): the pages of a training program may be many, and its threads hold locks.
int start_program(const std::vector<std::string>& command, int output, pid_t& process) {
  std::vector<char*> arguments;
  for (const auto& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  const int error =
      posix_spawnp(&process, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  return error;
}

// Appends what comes out of the pipe, until its other end is closed. \return false at the deadline.
bool read_to_end(int pipe, Clock::time_point deadline, std::string& text) {
  std::array<char, 65536> block;
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd wait{pipe, POLLIN, 0};
    const int ready = poll(&wait, 1, static_cast<int>(std::max<int64_t>(left.count(), 0)));
    if (ready == 0) return false;
    if (ready < 0 && errno != EINTR) return true;
    if (ready < 0) continue;
    const auto count = read(pipe, block.data(), block.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return true;
    text.append(block.data(), static_cast<size_t>(count));
  }
}

}  // namespace

ProgramOutput output_of(const std::vector<std::string>& command, Clock::time_point deadline) {
  ProgramOutput output;
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return {"", std::strerror(errno)};
  const Fd reads(ends[0]);
  Fd writes(ends[1]);
  pid_t process = 0;
  if (const int error = start_program(command, writes.get(), process))
    return {"", std::strerror(error)};
  writes.reset();
  const bool in_time = read_to_end(reads.get(), deadline, output.text);
  if (!in_time) {
    kill(process, SIGKILL);
    output.error = "no answer in time";
  }
  int status = 0;
  pid_t ended = 0;
  do {
    ended = waitpid(process, &status, 0);
  } while (ended < 0 && errno == EINTR);
  // Where the program ignores SIGCHLD, the system keeps no status.
  if (in_time && ended == process && status != 0) output.error = ddp::str("it ended by ", status);
  return output;
}

}  // namespace ddp::profiling
