#include "launch/hosts/host.h"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <sstream>
#include <string>
#include <system_error>

#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "launch/processes/signals.h"

namespace ddp::launch {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::minutes kReachLimit(5);
constexpr std::chrono::seconds kAnswerLimit(5);  // for the rest of a line that has begun
constexpr int kRetryMs = 100;

/// Leaves out the signals that are only forwarded to the ranks or only wake a Supervisor.
sigset_t ending_signals() {
  sigset_t signals = awaited_signals();
  for (const int signal : {SIGCHLD, SIGWINCH, SIGUSR1, SIGUSR2}) ::sigdelset(&signals, signal);
  return signals;
}

}  // namespace

Host::Host(const LaunchOptions& options, int lifeline) : options_(options), lifeline_(lifeline) {
  const sigset_t signals = ending_signals();
  signals_ = Fd(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals_) throw std::system_error(errno, std::generic_category(), "cannot await signals");
  if (options_.node_rank == 0) coordinator_.emplace(options_);
}

std::variant<Attempt, Host::End> Host::next_attempt() {
  if (!socket_) {
    if (const int signal = join()) return End{128 + signal};
  }
  for (;;) {
    if (const int signal = wait(socket_.fd(), -1)) return End{128 + signal};
    const auto line = socket_.read_line(kAnswerLimit);
    if (!line) throw std::runtime_error("lost node 0's ddprun at " + options_.master_addr);
    std::istringstream words(*line);
    std::string word;
    words >> word;
    if (word == "refuse") throw std::runtime_error(line->substr(word.size() + 1));
    if (word == "start") {
      Attempt attempt = {};
      words >> attempt.number >> attempt.master_port;
      attempt.end_fd = socket_.fd();
      return attempt;
    }
    if (word == "finish") {
      End end = {1};
      std::string text;
      words >> end.exit_code >> std::ws;
      if (std::getline(words, text)) std::fprintf(stderr, "ddprun: %s\n", text.c_str());
      return end;
    }
    // The line is "end", for an attempt that has already ended here.
  }
}

void Host::report(int exit_code, bool restartable) {
  socket_.send_line(
      "ended " + std::to_string(exit_code) + " " + std::to_string(static_cast<int>(restartable)));
}

int Host::join() {
  const auto deadline = Clock::now() + kReachLimit;
  // Node 0 may be unable to reach itself by the name that the others use for it.
  const std::string host = coordinator_ ? "localhost" : options_.master_addr;
  while (!(socket_ = connect_to(host, options_.master_port))) {
    if (Clock::now() >= deadline) {
      throw std::runtime_error(
          "cannot reach node 0's ddprun at " + host + ":" + std::to_string(options_.master_port) +
          " within 5 minutes. Start it there, with --node-rank 0.");
    }
    if (const int signal = wait(-1, kRetryMs)) return signal;
  }
  socket_.send_line(
      "join " + std::to_string(options_.node_rank) + " " + std::to_string(options_.nodes) + " " +
      std::to_string(options_.local_ranks) + " " + std::to_string(options_.max_restarts));
  return 0;
}

int Host::wait(int fd, int wait_ms) const {
  pollfd waited[] = {{signals_.get(), POLLIN, 0}, {lifeline_, POLLIN, 0}, {fd, POLLIN, 0}};
  ::poll(waited, 3, wait_ms);
  signalfd_siginfo info;
  if (::read(signals_.get(), &info, sizeof(info)) == sizeof(info)) {
    return static_cast<int>(info.ssi_signo);
  }
  return waited[1].revents != 0 ? SIGKILL : 0;
}

}  // namespace ddp::launch
