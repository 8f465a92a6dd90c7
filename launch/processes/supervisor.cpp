#include "launch/processes/supervisor.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <optional>
#include <system_error>

#include <fcntl.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "launch/environment.h"
#include "launch/output/log_file.h"
#include "launch/processes/exit_status.h"
#include "launch/processes/process_tree.h"
#include "launch/processes/signals.h"
#include "launch/processes/spawn.h"

namespace ddp::launch {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kGraceAfterFailure(3000);
constexpr milliseconds kGraceAfterSignal(5000);
constexpr milliseconds kWaitAfterKill(2000);
constexpr milliseconds kKillAgainEvery(20);

std::string count_of(int n, const std::string& noun) {
  return std::to_string(n) + " " + noun + (n == 1 ? "" : "s");
}

}  // namespace

Supervisor::Supervisor(const LaunchOptions& options, const Attempt& attempt, int lifeline)
    : options_(options),
      attempt_(attempt),
      lifeline_(lifeline),
      output_(STDOUT_FILENO, STDERR_FILENO) {
  const sigset_t signals = awaited_signals();
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  ::signal(SIGPIPE, SIG_IGN);  // a write reports EPIPE
  signals_ = Fd(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals_) throw std::system_error(errno, std::generic_category(), "cannot await signals");
}

int Supervisor::run() {
  start_ranks();
  while (state_ != State::Done) {
    wait_for_event();
    handle_signals();
    check_lifeline();
    copy_output();
    reap_ended();
    check_other_hosts();
    check_stops();
    advance();
  }
  finish_output();
  if (const auto error = output_.log_error()) {
    output_.say(std::string("the logs are not complete: ") + std::strerror(error));
    output_.copy();
  }
  return exit_code_;
}

void Supervisor::start_ranks() {
  const Environment inherited = current_environment();
  const auto threads = omp_threads(options_, own_variable("OMP_NUM_THREADS"), usable_cores());
  const Fd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!null) throw std::system_error(errno, std::generic_category(), "cannot open /dev/null");

  if (attempt_.number > 0) {
    output_.say(
        "restart " + std::to_string(attempt_.number) + " of " +
        std::to_string(options_.max_restarts) + ": starting " +
        count_of(options_.local_ranks, "rank") + " again");
  }
  for (int local_rank = 0; local_rank < options_.local_ranks; ++local_rank) {
    const int rank = global_rank(options_, local_rank);
    StandardFds fds = {rank == 0 ? STDIN_FILENO : null.get(), STDOUT_FILENO, STDERR_FILENO};
    Output::RankEnds ends;
    if (options_.prefix) {
      ends = output_.add_rank(rank, log_of(options_, attempt_, rank));
      fds.out = ends.out.get();
      fds.err = ends.err.get();
    }
    const pid_t pid = spawn(
        options_.command, rank_environment(inherited, options_, attempt_, local_rank, threads),
        fds);
    ranks_.push_back({rank, local_rank, pid, true});
    deaths_.watch(pid);
  }
}

void Supervisor::wait_for_event() {
  std::vector<pollfd> waited = {{signals_.get(), POLLIN, 0}, {deaths_.fd(), POLLIN, 0}};
  if (lifeline_is_open_) waited.push_back({lifeline_, POLLIN, 0});
  if (state_ == State::Running) waited.push_back({attempt_.end_fd, POLLIN, 0});
  output_.add_to(waited);

  milliseconds timeout(-1);
  if (state_ == State::Killing) timeout = kKillAgainEvery;
  if (state_ == State::Ending || stall_deadline_) {
    const auto end = stall_deadline_.value_or(deadline_);
    timeout = std::max(std::chrono::ceil<milliseconds>(end - Clock::now()), milliseconds(0));
  }
  ::poll(waited.data(), waited.size(), static_cast<int>(timeout.count()));
}

void Supervisor::handle_signals() {
  while (const auto signal = next_signal(signals_.get())) {
    if (*signal == SIGWINCH) {
      output_.resize();
    } else if (*signal != SIGCHLD) {  // SIGCHLD only wakes the loop
      on_signal(*signal);
    }
  }
}

void Supervisor::on_signal(int signal) {
  if (!is_only_forwarded(signal)) ++signals_taken_;
  if (state_ == State::Running) {
    output_.say(
        "got " + signal_name(signal) + "; passing it on to " + count_of(count_alive(), "rank"));
    if (is_only_forwarded(signal)) return send_to_job(signal);
    exit_code_ = 128 + signal;
    begin_ending(signal, options_.grace.value_or(kGraceAfterSignal));
  } else if (state_ == State::Ending && signal == SIGINT) {
    output_.say("got SIGINT while ending; killing " + names_of_running());
    begin_killing();
  } else if (state_ == State::Ending) {
    send_to_job(signal);
  }
}

void Supervisor::check_lifeline() {
  if (!lifeline_is_open_) return;
  pollfd lifeline = {lifeline_, POLLIN, 0};
  if (::poll(&lifeline, 1, 0) <= 0) return;
  lifeline_is_open_ = false;
  if (state_ == State::Running) exit_code_ = 128 + SIGKILL;
  output_.say("was killed itself; killing " + names_of_running());
  begin_killing();
}

/// Only notices that the attempt has ended elsewhere; Host reads the line after the attempt.
void Supervisor::check_other_hosts() {
  pollfd other = {attempt_.end_fd, POLLIN, 0};
  if (state_ != State::Running || ::poll(&other, 1, 0) <= 0) return;
  output_.say("another host ended the attempt; ending " + count_of(count_alive(), "rank"));
  begin_ending(SIGTERM, options_.grace.value_or(kGraceAfterFailure));
}

void Supervisor::reap_ended() {
  const auto take = [this](pid_t pid) {
    const int status = reap(pid, 0).value();
    if (Rank* rank = find_alive(pid)) on_rank_end(*rank, status);
  };
  for (const pid_t pid : deaths_.died()) take(pid);
  // Reaps the rest: processes whose parent died before them, and ranks on kernels without pidfds.
  for (;;) {
    siginfo_t info = {};
    any_children_ = ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0;
    // Leave a watched rank that died just now for the next round, to keep the order of deaths.
    if (!any_children_ || info.si_pid == 0 || deaths_.watches(info.si_pid)) return;
    take(info.si_pid);
  }
}

void Supervisor::on_rank_end(Rank& rank, int status) {
  rank.alive = false;
  output_.drain(rank.local_rank);
  const int code = exit_code_of(status);
  if (code == 0) return;

  std::string report = "rank " + std::to_string(rank.global_rank) + " (pid " +
                       std::to_string(rank.pid) + ") " + describe_end(status);
  if (state_ == State::Running) {
    exit_code_ = code;
    rank_failed_ = true;
    if (count_alive() > 0) report += "; ending the other " + count_of(count_alive(), "rank");
    output_.say(report);
    begin_ending(SIGTERM, options_.grace.value_or(kGraceAfterFailure));
    return;
  }
  const bool as_requested = std::count(sent_signals_.begin(), sent_signals_.end(), code - 128) > 0;
  if (!as_requested) output_.say(report);
}

void Supervisor::check_stops() {
  for (Rank& rank : ranks_) {
    siginfo_t info = {};
    constexpr int kChanges = WSTOPPED | WCONTINUED | WNOHANG;
    if (!rank.alive || ::waitid(P_PID, static_cast<id_t>(rank.pid), &info, kChanges) != 0) continue;
    if (info.si_pid == 0) continue;
    rank.stopped = info.si_code == CLD_STOPPED;
    if (!rank.stopped) continue;
    output_.say(
        "rank " + std::to_string(rank.global_rank) + " (pid " + std::to_string(rank.pid) +
        ") was stopped by signal " + std::to_string(info.si_status) + " (" +
        signal_name(info.si_status) + ")");
  }
}

void Supervisor::copy_output() {
  output_.copy();
  if (output_.error() == 0 || state_ != State::Running) return;
  exit_code_ = 128 + SIGPIPE;
  output_.say(
      std::string("cannot write the ranks' output: ") + std::strerror(output_.error()) +
      "; ending " + count_of(count_alive(), "rank"));
  begin_ending(SIGTERM, options_.grace.value_or(kGraceAfterFailure));
}

void Supervisor::advance() {
  if (!any_children_) {
    state_ = State::Done;
    return;
  }
  switch (state_) {
    case State::Running:
      // Processes that the ranks left running in the background end with them.
      if (count_alive() == 0) {
        begin_ending(SIGTERM, options_.grace.value_or(kGraceAfterFailure));
      } else {
        end_stall();
      }
      break;
    case State::Ending:
      if (Clock::now() >= deadline_) {
        output_.say("the grace period is over; killing " + names_of_running());
        begin_killing();
      }
      break;
    case State::Killing:
      // Kill again: a process may have forked while the signals were sent.
      send_to_job(SIGKILL);
      // The guard reports the processes that cannot be killed now.
      if (Clock::now() >= deadline_) state_ = State::Done;
      break;
    case State::Done:
      break;
  }
}

/// Ends a job whose last ranks are stopped: nothing else can. It does not kill them at once, as a
/// user who stopped the whole job may be resuming one process after the other.
void Supervisor::end_stall() {
  if (!only_stopped_ranks_are_left()) {
    stall_deadline_.reset();
  } else if (!stall_deadline_) {
    stall_deadline_ = Clock::now() + options_.grace.value_or(kGraceAfterFailure);
  } else if (Clock::now() >= *stall_deadline_) {
    rank_failed_ = true;
    output_.say("all other ranks have ended; killing " + names_of_running() + ", which is stopped");
    exit_code_ = 128 + SIGKILL;
    begin_killing();
  }
}

void Supervisor::begin_ending(int signal, milliseconds grace) {
  stall_deadline_.reset();
  state_ = State::Ending;
  deadline_ = Clock::now() + grace;
  send_to_job(signal);
}

void Supervisor::begin_killing() {
  stall_deadline_.reset();
  state_ = State::Killing;
  deadline_ = Clock::now() + kWaitAfterKill;
  send_to_job(SIGKILL);
}

/// Signals each process once: some programs take a second signal as an order to hurry.
void Supervisor::send_to_job(int signal) {
  sent_signals_.push_back(signal);
  for (const Rank& rank : ranks_) {
    if (rank.alive) ::kill(-rank.pid, signal);
  }
  for (const Process& process : descendants()) {
    const bool reached = std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) {
      return rank.alive && rank.pid == process.group;
    });
    if (!reached) ::kill(process.pid, signal);
  }
}

/// Writes the rest of the output, at the reader's pace; a second signal stops waiting.
void Supervisor::finish_output() {
  for (const Rank& rank : ranks_) output_.drain(rank.local_rank);
  output_.copy();
  const int signals_before = signals_taken_;
  while (lifeline_is_open_ && !output_.flushed() && signals_taken_ == signals_before) {
    wait_for_event();
    handle_signals();
    check_lifeline();
    output_.copy();
  }
}

Supervisor::Rank* Supervisor::find_alive(pid_t pid) {
  const auto rank = std::find_if(ranks_.begin(), ranks_.end(), [pid](const Rank& candidate) {
    return candidate.alive && candidate.pid == pid;
  });
  return rank == ranks_.end() ? nullptr : &*rank;
}

int Supervisor::count_alive() const {
  return static_cast<int>(
      std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.alive; }));
}

/// Whether all ranks that are left are stopped, and at least one rank has ended.
bool Supervisor::only_stopped_ranks_are_left() const {
  const int alive = count_alive();
  const auto stopped = std::count_if(
      ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.alive && rank.stopped; });
  return alive > 0 && alive == stopped && alive < static_cast<int>(ranks_.size());
}

/// Returns "rank 0 (pid 12), rank 1 (pid 13)", or a text for processes that outlived their ranks.
std::string Supervisor::names_of_running() const {
  std::string names;
  for (const Rank& rank : ranks_) {
    if (!rank.alive) continue;
    names += (names.empty() ? "rank " : ", rank ") + std::to_string(rank.global_rank) + " (pid " +
             std::to_string(rank.pid) + ")";
  }
  return names.empty() ? "the processes that the ranks left behind" : names;
}

}  // namespace ddp::launch
