#include "launch/child.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <thread>

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

namespace ddp::testing {
namespace {

using Clock = std::chrono::steady_clock;

void make_pipe(int (&ends)[2]) {
  if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
}

void close_fd(int& fd) {
  if (fd >= 0) ::close(fd);
  fd = -1;
}

}  // namespace

Child::Child(const std::vector<std::string>& command, const ChildOptions& options) {
  int in[2];
  int out[2];
  int err[2];
  make_pipe(in);
  make_pipe(out);
  make_pipe(err);
  std::vector<char*> arguments;
  for (const auto& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);

  pid_ = ::fork();
  if (pid_ < 0) throw std::runtime_error("fork failed");
  if (pid_ == 0) {
    ::dup2(in[0], STDIN_FILENO);
    ::dup2(out[1], STDOUT_FILENO);
    ::dup2(options.join_streams ? out[1] : err[1], STDERR_FILENO);
    // Whoever runs the tests may ignore signals: a script's background does.
    for (const int signal : {SIGHUP, SIGINT, SIGQUIT, SIGPIPE}) ::signal(signal, SIG_DFL);
    for (const int signal : options.ignored_signals) ::signal(signal, SIG_IGN);
    for (const auto& entry : options.environment) {
      // putenv of a bare name takes the variable out.
      ::putenv(const_cast<char*>(entry.c_str()));
    }
    ::execvp(arguments[0], arguments.data());
    ::_exit(127);
  }
  for (int fd : {in[0], out[1], err[1]}) ::close(fd);
  // Short enough for the pipe to take at once.
  const ssize_t written = ::write(in[1], options.input.data(), options.input.size());
  ::close(in[1]);
  out_ = out[0];
  err_ = err[0];
  if (written != static_cast<ssize_t>(options.input.size())) fail("cannot write its input");
}

Child::~Child() {
  close_fd(out_);
  close_fd(err_);
  if (reaped_) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void Child::send(int signal) const { ::kill(pid_, signal); }

void Child::fail(const std::string& what) {
  throw std::runtime_error(what + "\nstdout:\n" + ended_.out + "\nstderr:\n" + ended_.err);
}

/// Reads what comes next; false when both streams have ended.
bool Child::read_some(Clock::time_point deadline) {
  pollfd fds[] = {{out_, POLLIN, 0}, {err_, POLLIN, 0}};  // poll skips negative descriptors
  if (out_ < 0 && err_ < 0) return false;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  if (left.count() <= 0 || ::poll(fds, 2, static_cast<int>(left.count())) == 0) {
    fail("the program took too long");
  }
  static char buffer[1 << 16];
  if (fds[0].revents != 0) {
    const ssize_t got = ::read(out_, buffer, sizeof(buffer));
    if (got > 0) ended_.out.append(buffer, got);
    if (got <= 0) close_fd(out_);
  }
  if (fds[1].revents != 0) {
    const ssize_t got = ::read(err_, buffer, sizeof(buffer));
    if (got > 0) ended_.err.append(buffer, got);
    if (got <= 0) close_fd(err_);
  }
  return true;
}

void Child::read_until(const std::string& text, int times) {
  const auto deadline = Clock::now() + kPatience;
  size_t from = 0;
  for (int found = 0; found < times;) {
    const size_t at = ended_.out.find(text, from);
    if (at != std::string::npos) {
      ++found;
      from = at + 1;
      continue;
    }
    // The end may be the beginning of `text`.
    from = std::max(from, ended_.out.size() - std::min(ended_.out.size(), text.size()));
    if (!read_some(deadline)) fail("the program ended before it wrote '" + text + "'");
  }
}

void Child::stop_reading() { close_fd(out_); }

Ended Child::wait() {
  const auto deadline = Clock::now() + kPatience;
  while (read_some(deadline)) {
  }
  int status = 0;
  const bool ended = eventually([&] { return ::waitpid(pid_, &status, WNOHANG) == pid_; });
  if (!ended) fail("the program does not end");
  reaped_ = true;
  ended_.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return ended_;
}

Ended run(const std::vector<std::string>& command, const ChildOptions& options) {
  return Child(command, options).wait();
}

std::vector<std::string> ddprun_sh(std::vector<std::string> options, const std::string& script) {
  std::vector<std::string> command = {DDPRUN};
  command.insert(command.end(), options.begin(), options.end());
  command.insert(command.end(), {"sh", "-c", script});
  return command;
}

bool eventually(const std::function<bool()>& condition, std::chrono::milliseconds patience) {
  const auto deadline = Clock::now() + patience;
  while (!condition()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

bool is_gone(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  std::getline(file, stat);
  const size_t name_end = stat.rfind(')');
  return name_end == std::string::npos || stat.compare(name_end, 3, ") Z") == 0;
}

std::vector<int> numbers_after(const std::string& text, const std::string& label) {
  std::vector<int> numbers;
  for (size_t at = text.find(label); at != std::string::npos; at = text.find(label, at + 1)) {
    numbers.push_back(std::atoi(text.c_str() + at + label.size()));
  }
  return numbers;
}

std::vector<std::string> sorted_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  std::sort(lines.begin(), lines.end());
  return lines;
}

}  // namespace ddp::testing
