#include "differential/worker.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <thread>

#include <ddp/flight_record.h>

#include "differential/lists.h"
#include "differential/stream.h"

namespace ddp::differential {
namespace {

constexpr int kProgramsOfOneChild = 100;
constexpr auto kHang = std::chrono::seconds(20);  // the child says where its ranks are
constexpr auto kDead = std::chrono::seconds(25);  // it does not even say that

void write_all(int fd, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const auto n = ::write(fd, text.data() + done, text.size() - done);
    if (n <= 0) throw std::runtime_error("differential: the pipe to a worker is closed");
    done += static_cast<size_t>(n);
  }
}

/// Reads to the end of a message; false where the other side ended, or the time is over.
bool read_message(int fd, std::string& message, std::chrono::milliseconds timeout) {
  message.clear();
  const auto end = std::chrono::steady_clock::now() + timeout;
  char buffer[4096];
  while (message.empty() || message.back() != '\0') {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    pollfd waiting{fd, POLLIN, 0};
    if (left.count() <= 0 || ::poll(&waiting, 1, static_cast<int>(left.count())) == 0) return false;
    const auto n = ::read(fd, buffer, sizeof buffer);
    if (n <= 0) return false;
    message.append(buffer, static_cast<size_t>(n));
  }
  message.pop_back();
  return true;
}

/// Ends the process where a program does not end, with what its ranks have called.
class Watchdog {
 public:
  explicit Watchdog(int out) : out_(out), thread_([this] { watch(); }) { thread_.detach(); }
  void begin() { deadline_ = Clock::now() + kHang; }
  void end() { deadline_ = Clock::time_point::max(); }

 private:
  using Clock = std::chrono::steady_clock;
  void watch() {
    while (Clock::now() < deadline_.load())
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const std::string path = "/tmp/differential-" + std::to_string(::getpid()) + ".json";
    try {
      dump_flight_record(path);
    } catch (const std::exception&) {
      // then without
    }
    std::ifstream file(path);
    const std::string record(std::istreambuf_iterator<char>(file), {});
    ::unlink(path.c_str());
    write_all(out_, "hang\nno end after 20 s; the ranks' calls: " + record.substr(0, 20000) + '\0');
    ::_exit(0);
  }

  int out_;
  std::atomic<Clock::time_point> deadline_{Clock::time_point::max()};
  std::thread thread_;
};

/// A child's whole life.
[[noreturn]] void serve(int in, int out) {
  std::string text;
  Watchdog watchdog(out);
  while (read_message(in, text, std::chrono::hours(24))) {
    watchdog.begin();
    // A program, and the file for its trace where one is asked for.
    const auto line = text.find('\n');
    const auto outcome = run_here(
        parse(text.substr(0, line)), line == std::string::npos ? "" : text.substr(line + 1));
    watchdog.end();
    write_all(out, outcome.kind + "\n" + outcome.text + '\0');
  }
  std::_Exit(0);
}

}  // namespace

struct Worker::Child {
  Child() {
    int to[2], from[2];
    if (::pipe(to) != 0 || ::pipe(from) != 0) throw std::runtime_error("differential: no pipe");
    pid = ::fork();
    if (pid == 0) {
      ::close(to[1]);
      ::close(from[0]);
      serve(to[0], from[1]);
    }
    ::close(to[0]);
    ::close(from[1]);
    in = to[1];
    out = from[0];
  }
  ~Child() {
    ::close(in);
    ::close(out);
    if (!ended) ::kill(pid, SIGKILL), wait();
  }
  int wait() {
    int status = 0;
    ::waitpid(pid, &status, 0);
    ended = true;
    return status;
  }

  pid_t pid = -1;
  int in = -1, out = -1;
  int programs = 0;
  bool ended = false;
};

Worker::Worker() {
  ::signal(SIGPIPE, SIG_IGN);
  files_of("lines", false, false);  // before children, which do not remove them
}
Worker::~Worker() = default;

std::string Worker::print(const Program& program) {
  const std::string path = "/tmp/differential-" + std::to_string(::getpid()) + ".trace";
  child_.reset();
  const auto outcome = run(program, path);
  child_.reset();
  std::vector<std::string> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  ::unlink(path.c_str());
  return as_cpp(program, lines, outcome);
}

Outcome Worker::run(const Program& program, const std::string& trace) {
  auto outcome = run_on_threads(program, trace);
  const bool ends_well = outcome.kind.empty() && refusals(program).empty();
  if (ends_well && trace.empty() && program.is("calls", "listed")) return compare_lists(program);
  return outcome;
}

Outcome Worker::run_on_threads(const Program& program, const std::string& trace) {
  // It replaces the process's autograd engine.
  const bool alone = program.is("recompute", "saved_on_host");
  if (child_ && (alone || child_->programs >= kProgramsOfOneChild)) child_.reset();
  if (!child_) child_ = std::make_unique<Child>();
  child_->programs += alone ? kProgramsOfOneChild : 1;
  std::string answer;
  write_all(child_->in, text_of(program) + (trace.empty() ? "" : "\n" + trace) + '\0');
  const auto start = std::chrono::steady_clock::now();
  if (read_message(child_->out, answer, kDead)) {
    const auto end = answer.find('\n');
    if (answer.substr(0, end) == "hang") child_.reset();
    return {answer.substr(0, end), answer.substr(end + 1)};
  }
  if (std::chrono::steady_clock::now() - start >= kDead) {
    child_.reset();
    return {"hang", "no end after 25 s, and no answer"};
  }
  const int status = child_->wait();
  child_.reset();
  return {
      "crash", WIFSIGNALED(status) ? strsignal(WTERMSIG(status))
                                   : "exit code " + std::to_string(WEXITSTATUS(status))};
}

}  // namespace ddp::differential
