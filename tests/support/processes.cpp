#include "support/processes.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <memory>
#include <set>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

namespace ddp::testing {
namespace {

struct Pipe {
  Fd read;
  Fd write;
};

/// \param bytes  that can be written to it before somebody reads; 0: the system's default.
Pipe make_pipe(int bytes = 0) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
  if (bytes > 0) ::fcntl(ends[1], F_SETPIPE_SZ, bytes);
  return {Fd(ends[0]), Fd(ends[1])};
}

void set_columns(const Fd& fd, int columns) {
  winsize size{};
  size.ws_row = 25;
  size.ws_col = static_cast<unsigned short>(columns);
  ::ioctl(fd.get(), TIOCSWINSZ, &size);
}

/// Makes a terminal that does not change the bytes written to it.
Pipe make_terminal(int columns) {
  Fd read(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  if (!read || ::grantpt(read.get()) != 0 || ::unlockpt(read.get()) != 0) {
    throw std::runtime_error("no pseudo-terminal");
  }
  Fd write(::open(::ptsname(read.get()), O_RDWR | O_NOCTTY | O_CLOEXEC));
  termios attributes{};
  ::tcgetattr(write.get(), &attributes);
  ::cfmakeraw(&attributes);
  ::tcsetattr(write.get(), TCSANOW, &attributes);
  set_columns(read, columns);
  return {std::move(read), std::move(write)};
}

std::string new_mark() {
  static std::atomic<int> count{0};
  return "DDP_TEST_PROCESS=" + std::to_string(::getpid()) + "." + std::to_string(++count);
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  // An iterator would throw where a process of /proc ends between opening and reading.
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

struct Marked {
  pid_t pid;
  std::string rank;  // from its environment; may be empty
};

/// Lists the processes with `mark` in their environment. They inherit it wherever they move, while
/// parents, groups and sessions may change.
std::vector<Marked> processes_with(const std::string& mark) {
  std::vector<Marked> found;
  const std::unique_ptr<DIR, int (*)(DIR*)> proc(::opendir("/proc"), ::closedir);
  while (const dirent* entry = proc ? ::readdir(proc.get()) : nullptr) {
    if (!std::isdigit(static_cast<unsigned char>(entry->d_name[0]))) continue;
    std::istringstream variables(read_file(std::string("/proc/") + entry->d_name + "/environ"));
    Marked process = {static_cast<pid_t>(std::atoi(entry->d_name)), ""};
    bool marked = false;
    for (std::string variable; std::getline(variables, variable, '\0');) {
      marked = marked || variable == mark;
      if (variable.compare(0, 5, "RANK=") == 0) process.rank = variable.substr(5);
    }
    if (marked) found.push_back(process);
  }
  return found;
}

/// Returns "rank 1", or without ranks "sleep (pid 12)".
std::string names_of(const std::vector<Marked>& processes) {
  std::set<std::string> ranks;
  std::string others;
  for (const auto& [pid, rank] : processes) {
    if (!rank.empty()) ranks.insert("rank " + rank);
    std::string name = read_file("/proc/" + std::to_string(pid) + "/comm");
    if (!name.empty()) name.pop_back();
    others += (others.empty() ? "" : ", ") + name + " (pid " + std::to_string(pid) + ")";
  }
  if (ranks.empty()) return others.empty() ? "nothing" : others;
  std::string names;
  for (const auto& rank : ranks) names += (names.empty() ? "" : ", ") + rank;
  return names;
}

/// Kills all processes that carry the mark, with their groups, until none is left.
void kill_all(const std::string& mark) {
  eventually([&] {
    const auto left = processes_with(mark);
    for (const auto& process : left) {
      const pid_t group = ::getpgid(process.pid);
      if (group > 0 && group != ::getpgrp()) ::kill(-group, SIGKILL);
      ::kill(process.pid, SIGKILL);
    }
    return left.empty();
  });
}

}  // namespace

Process::Process(const std::vector<std::string>& command, const ProcessOptions& options)
    : mark_(new_mark()), timeout_(options.timeout) {
  const int columns = options.terminal_columns;
  Pipe in = make_pipe();
  Pipe out = columns > 0 ? make_terminal(columns) : make_pipe(options.pipe_bytes);
  Pipe err = make_pipe(options.pipe_bytes);
  std::vector<char*> arguments;
  for (const auto& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);

  pid_ = ::fork();
  if (pid_ < 0) throw std::runtime_error("fork failed");
  if (pid_ == 0) {
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // in case the test itself is killed
    ::dup2(in.read.get(), STDIN_FILENO);
    ::dup2(out.write.get(), STDOUT_FILENO);
    ::dup2(options.join_streams ? STDOUT_FILENO : err.write.get(), STDERR_FILENO);
    // The caller may ignore signals, as a script's background jobs do.
    for (const int signal : {SIGHUP, SIGINT, SIGQUIT, SIGPIPE}) ::signal(signal, SIG_DFL);
    for (const int signal : options.ignored_signals) ::signal(signal, SIG_IGN);
    for (const auto& entry : options.environment) {
      // putenv of a bare name removes the variable.
      ::putenv(const_cast<char*>(entry.c_str()));
    }
    ::putenv(const_cast<char*>(mark_.c_str()));
    ::execvp(arguments[0], arguments.data());
    ::_exit(127);
  }
  // Short enough for the pipe to take at once.
  const ssize_t written = ::write(in.write.get(), options.input.data(), options.input.size());
  out_ = std::move(out.read);
  err_ = std::move(err.read);
  if (written != static_cast<ssize_t>(options.input.size())) fail("cannot write its input");
}

Process::~Process() {
  out_.reset();
  err_.reset();
  if (!reaped_) ::kill(pid_, SIGKILL);  // it may have died before it carried the mark
  kill_all(mark_);
  if (!reaped_) ::waitpid(pid_, nullptr, 0);
}

void Process::send(int signal) const { ::kill(pid_, signal); }

void Process::fail(const std::string& what) {
  throw std::runtime_error(what + "\nstdout:\n" + ended_.out + "\nstderr:\n" + ended_.err);
}

/// Reads the next bytes; returns false when both streams have ended.
bool Process::read_some(Clock::time_point deadline) {
  pollfd fds[] = {
      {out_.get(), POLLIN, 0}, {err_.get(), POLLIN, 0}};  // poll skips negative descriptors
  if (!out_ && !err_) return false;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  if (left.count() <= 0 || ::poll(fds, 2, static_cast<int>(left.count())) == 0) {
    fail("still running after the time it had: " + names_of(processes_with(mark_)));
  }
  static char buffer[1 << 16];
  if (fds[0].revents != 0) {
    const ssize_t got = ::read(out_.get(), buffer, sizeof(buffer));
    if (got > 0) ended_.out.append(buffer, got);
    if (got <= 0) out_.reset();
  }
  if (fds[1].revents != 0) {
    const ssize_t got = ::read(err_.get(), buffer, sizeof(buffer));
    if (got > 0) ended_.err.append(buffer, got);
    if (got <= 0) err_.reset();
  }
  return true;
}

void Process::read_until(const std::string& text, int times) {
  const auto deadline = Clock::now() + kPatience;
  size_t from = 0;
  for (int found = 0; found < times;) {
    const size_t at = ended_.out.find(text, from);
    if (at != std::string::npos) {
      ++found;
      from = at + 1;
      continue;
    }
    // The end of the old output may be the beginning of `text`.
    from = std::max(from, ended_.out.size() - std::min(ended_.out.size(), text.size()));
    if (!read_some(deadline)) fail("the program ended before it wrote '" + text + "'");
  }
}

void Process::resize_terminal(int columns) const {
  set_columns(out_, columns);
  send(SIGWINCH);
}

void Process::stop_reading() { out_.reset(); }

Ended Process::wait() {
  const auto deadline = Clock::now() + timeout_;
  while (read_some(deadline)) {
  }
  int status = 0;
  const bool ended = eventually([&] { return ::waitpid(pid_, &status, WNOHANG) == pid_; });
  if (!ended) fail("closed its output and does not end: " + names_of(processes_with(mark_)));
  reaped_ = true;
  ended_.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return ended_;
}

Ended run(const std::vector<std::string>& command, const ProcessOptions& options) {
  return Process(command, options).wait();
}

JobEnded run_job(int size, const std::vector<std::string>& command, ProcessOptions options) {
  std::vector<std::string> arguments = {"-n", std::to_string(size), "--"};
  arguments.insert(arguments.end(), command.begin(), command.end());
  options.join_streams = true;
  Ended ended = run(ddprun(arguments), options);

  JobEnded job;
  job.code = ended.code;
  job.ranks.resize(size);
  for (const auto& line : lines_of(ended.out)) {
    const size_t prefix_end = line.find("] ");
    const bool of_rank = line[0] == '[' && prefix_end != std::string::npos;
    auto& lines = of_rank ? job.ranks.at(std::stoi(line.substr(1))) : job.ddprun;
    lines.push_back(of_rank ? line.substr(prefix_end + 2) : line);
  }
  job.output = std::move(ended.out);
  return job;
}

std::vector<std::string> ddprun(const std::vector<std::string>& arguments) {
  std::vector<std::string> command = {DDPRUN_PROGRAM};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return command;
}

std::vector<std::string> ddprun_sh(std::vector<std::string> options, const std::string& script) {
  options.insert(options.end(), {"sh", "-c", script});
  return ddprun(options);
}

bool eventually(const std::function<bool()>& condition, std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

bool is_gone(pid_t pid) {
  const std::string stat = read_file("/proc/" + std::to_string(pid) + "/stat");
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

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::vector<std::string> sorted_lines(const std::string& text) {
  auto lines = lines_of(text);
  std::sort(lines.begin(), lines.end());
  return lines;
}

}  // namespace ddp::testing
