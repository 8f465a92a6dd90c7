#include "launch/elastic/elastic_host.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ddp/internal/text.h>

#include "launch/hosts/line_socket.h"
#include "launch/output/log_file.h"
#include "launch/processes/exit_status.h"
#include "launch/processes/process_tree.h"
#include "launch/processes/signals.h"
#include "launch/processes/spawn.h"

namespace ddp::launch {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kElasticGrace(3000);
constexpr milliseconds kLeavingGrace(30000);
constexpr milliseconds kElasticKillWait(2000);
constexpr milliseconds kElasticKillEvery(20);
constexpr milliseconds kCoordinatorRetry(1000);
constexpr std::chrono::minutes kCoordinatorLimit(5);

/// The variables of a rank, with where its coordinator is.
Environment environment_of(
    const LaunchOptions& options, const CoordinatorAddress& coordinator, const Attempt& attempt,
    int local_rank) {
  const auto threads = omp_threads(options, own_variable("OMP_NUM_THREADS"), usable_cores());
  auto result = rank_environment(current_environment(), options, attempt, local_rank, threads);
  const auto is_stale = [](const std::string& entry) {
    return entry.rfind("DDP_COORDINATOR=", 0) == 0 || entry.rfind("DDP_SLOT=", 0) == 0;
  };
  result.erase(std::remove_if(result.begin(), result.end(), is_stale), result.end());
  const bool is_ipv6 = coordinator.host.find(':') != std::string::npos;
  const auto host = is_ipv6 ? "[" + coordinator.host + "]" : coordinator.host;
  result.push_back(str("DDP_COORDINATOR=", host, ":", coordinator.port, "/", coordinator.token));
  result.push_back(str("DDP_SLOT=", global_rank(options, local_rank)));
  return result;
}

}  // namespace

ElasticHost::ElasticHost(
    const LaunchOptions& options, CoordinatorAddress coordinator, Carrier* own, int lifeline)
    : options_(options),
      coordinator_(std::move(coordinator)),
      own_(own),
      lifeline_(lifeline),
      null_(::open("/dev/null", O_RDONLY | O_CLOEXEC)),
      output_(STDOUT_FILENO, STDERR_FILENO),
      next_connect_(Clock::now()),
      deadline_(Clock::now() + kCoordinatorLimit) {
  const sigset_t signals = awaited_signals();
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  ::signal(SIGPIPE, SIG_IGN);  // a write reports EPIPE
  signals_ = Fd(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals_) throw std::system_error(errno, std::generic_category(), "cannot await signals");
  if (!null_) throw std::system_error(errno, std::generic_category(), "cannot open /dev/null");
}

int ElasticHost::run() {
  while (state_ != State::Done) {
    connect();
    wait_for_event();
    handle_signals();
    check_lifeline();
    output_.copy();
    // A rank's end is known before its connection's: then its cause is, too.
    reap_ended();
    if (own_ != nullptr) own_->serve();
    follow_job();
    advance();
  }
  send("bye");
  if (own_ != nullptr) own_->finish_sending();
  finish_output();
  if (const auto error = output_.log_error()) {
    output_.say(str("the logs are not complete: ", std::strerror(error)));
    output_.copy();
  }
  return exit_code_;
}

/// Says which ranks run, and which ended while the job could not be told.
void ElasticHost::connect() {
  if (job_ || Clock::now() < next_connect_ || state_ != State::Running) return;
  next_connect_ = Clock::now() + kCoordinatorRetry;
  LineSocket socket = connect_to(coordinator_.host, coordinator_.port);
  if (!socket) {
    if (has_joined_ || Clock::now() < deadline_) return;
    throw std::runtime_error(
        str("cannot reach node 0's ddprun at ", coordinator_.host, ":", coordinator_.port,
            " within 5 minutes. Start it there, with --elastic and --node-rank 0."));
  }
  job_ = LineChannel(socket.release());
  const bool knows = std::exchange(has_joined_, true);
  send(
      str("host ", coordinator_.token, " ", options_.local_ranks, " ",
          knows ? std::max<size_t>(1, ranks_.size()) : 0));
  for (const Rank& rank : ranks_) send(str("started ", rank.slot, " ", rank.pid));
  for (const auto& line : std::exchange(unsent_, {})) send(line);
}

void ElasticHost::wait_for_event() {
  std::vector<pollfd> waited = {{signals_.get(), POLLIN, 0}, {deaths_.fd(), POLLIN, 0}};
  if (lifeline_is_open_) waited.push_back({lifeline_, POLLIN, 0});
  job_.add_to(waited);
  if (own_ != nullptr) own_->add_to(waited);
  output_.add_to(waited);

  std::optional<Clock::time_point> next;
  const auto consider = [&](std::optional<Clock::time_point> time) {
    if (time && (!next || *time < *next)) next = time;
  };
  if (state_ == State::Running && !job_) consider(next_connect_);
  if (state_ == State::Killing) consider(Clock::now() + kElasticKillEvery);
  const bool has_deadline = state_ != State::Running && state_ != State::Coordinating;
  if (has_deadline) consider(deadline_);
  if (own_ != nullptr) consider(own_->next_time());
  milliseconds timeout(-1);
  if (next) {
    timeout = std::max(std::chrono::ceil<milliseconds>(*next - Clock::now()), milliseconds(0));
  }
  ::poll(waited.data(), waited.size(), static_cast<int>(timeout.count()));
}

void ElasticHost::handle_signals() {
  while (const auto signal = next_signal(signals_.get())) {
    if (*signal == SIGWINCH) {
      output_.resize();
    } else if (*signal != SIGCHLD) {  // SIGCHLD only wakes the loop
      on_signal(*signal);
    }
  }
}

void ElasticHost::on_signal(int signal) {
  if (is_only_forwarded(signal)) {
    output_.say(str("got ", signal_name(signal), "; passing it on to the ranks"));
    return send_to_job_processes(signal);
  }
  ++signals_taken_;
  exit_code_ = 128 + signal;
  stops_only_ = false;
  if (state_ == State::Running) send(str("signal ", signal));
  if (state_ == State::Running && signal == SIGTERM && job_) {
    output_.say("got SIGTERM; the ranks leave after their step");
    state_ = State::Leaving;
    leaves_ = true;
    deadline_ = Clock::now() + options_.grace.value_or(kLeavingGrace);
  } else if (state_ != State::Ending && state_ != State::Killing) {
    leaves_ = false;
    output_.say(str("got ", signal_name(signal), "; passing it on to the ranks"));
    begin_ending(signal);
  } else if (state_ == State::Ending && signal == SIGINT) {
    output_.say("got SIGINT while ending; killing the ranks");
    begin_killing();
  } else if (state_ == State::Ending) {
    send_to_job_processes(signal);
  }
}

void ElasticHost::check_lifeline() {
  if (!lifeline_is_open_) return;
  pollfd lifeline = {lifeline_, POLLIN, 0};
  if (::poll(&lifeline, 1, 0) <= 0) return;
  lifeline_is_open_ = false;
  stops_only_ = false;
  exit_code_ = 128 + SIGKILL;
  output_.say("was killed itself; killing the ranks");
  begin_killing();
}

void ElasticHost::follow_job() {
  for (const auto& line : job_.exchange()) follow(line);
}

void ElasticHost::follow(const std::string& line) {
  InputText words(line);
  std::string word;
  words >> word;
  int first = 0, second = 0, third = 0;
  if (word == "say") {
    output_.copy();  // what the ranks have written comes before what the coordinator says of them
    output_.say(line.substr(word.size() + 1));
  } else if (word == "start" && words >> first >> second && state_ == State::Running) {
    for (int local = 0; local < options_.local_ranks; ++local) start(local, first, second);
  } else if (word == "replace" && words >> first >> second >> third && state_ == State::Running) {
    start(first - first_slot(), second, third);
  } else if (word == "kill" && words >> first >> second) {
    for (const Rank& rank : ranks_) {
      if (rank.slot == first && rank.pid == second) ::kill(-rank.pid, SIGKILL);
    }
  } else if (word == "stop" && (state_ == State::Running || state_ == State::Leaving)) {
    stops_only_ = state_ == State::Running;
    begin_ending(SIGTERM);
  } else if (word == "finish" && words >> first >> second) {
    std::string text;
    if (std::getline(words >> std::ws, text)) output_.say(text);
    stops_only_ = leaves_ = false;
    if (state_ == State::Running || state_ == State::Leaving) {
      if (state_ == State::Running) exit_code_ = first;
      state_ = State::Finishing;
      deadline_ = Clock::now() + milliseconds(second);
    }
  }
}

void ElasticHost::start(int local_rank, int number, int port) {
  const int slot = first_slot() + local_rank;
  const Attempt attempt = {number, port};
  StandardFds fds = {
      slot == 0 && number == 0 ? STDIN_FILENO : null_.get(), STDOUT_FILENO, STDERR_FILENO};
  Output::RankEnds ends;
  if (options_.prefix) {
    ends = output_.add_rank(slot, log_of(options_, attempt, slot));
    fds.out = ends.out.get();
    fds.err = ends.err.get();
  }
  const pid_t pid =
      spawn(options_.command, environment_of(options_, coordinator_, attempt, local_rank), fds);
  ranks_.push_back({slot, local_rank, pid, outputs_++});
  deaths_.watch(pid);
  any_children_ = true;
  send(str("started ", slot, " ", pid));
}

void ElasticHost::reap_ended() {
  const auto take = [this](pid_t pid) {
    const int status = reap(pid, 0).value();
    on_rank_end(pid, status);
  };
  for (const pid_t pid : deaths_.died()) {
    ::kill(-pid, SIGKILL);  // what the rank left running has no part in the job any more
    take(pid);
  }
  // Reaps the rest: processes whose parent died before them, and ranks on kernels without pidfds.
  for (;;) {
    siginfo_t info = {};
    any_children_ = ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0;
    if (!any_children_ || info.si_pid == 0 || deaths_.watches(info.si_pid)) return;
    take(info.si_pid);
  }
}

void ElasticHost::on_rank_end(pid_t pid, int status) {
  const auto rank = std::find_if(
      ranks_.begin(), ranks_.end(), [pid](const Rank& candidate) { return candidate.pid == pid; });
  if (rank == ranks_.end()) return;
  output_.drain(rank->output);
  const auto line =
      str("exited ", rank->slot, " ", pid, " ", exit_code_of(status), " ", describe_end(status));
  ranks_.erase(rank);
  if (job_) {
    send(line);
  } else {
    unsent_.push_back(line);
  }
}

void ElasticHost::advance() {
  if (output_.error() != 0 && state_ == State::Running) {
    exit_code_ = 128 + SIGPIPE;
    send(str("signal ", SIGPIPE));
    begin_ending(SIGTERM);
  }
  switch (state_) {
    case State::Running:
      if (!job_ && has_joined_ && ranks_.empty()) {
        output_.say("lost the coordinator, and no rank is left");
        exit_code_ = 1;
        begin_ending(SIGTERM);
      }
      break;
    case State::Leaving:
    case State::Finishing:
      if (ranks_.empty() || Clock::now() >= deadline_) begin_ending(SIGTERM);
      break;
    case State::Coordinating:
      if (own_->exit_code()) state_ = State::Done;
      break;
    case State::Ending:
      if (any_children_ && Clock::now() >= deadline_) {
        output_.say("the grace period is over; killing the ranks");
        begin_killing();
      }
      break;
    case State::Killing:
      // Kill again: a process may have forked while the signals were sent.
      send_to_job_processes(SIGKILL);
      // The guard reports the processes that cannot be killed now.
      if (Clock::now() >= deadline_) state_ = State::Done;
      break;
    case State::Done:
      break;
  }
  const bool ends = state_ == State::Ending || state_ == State::Killing;
  if (ends && !any_children_) on_all_gone();
}

void ElasticHost::on_all_gone() {
  if (!stops_only_) {
    const bool serves = leaves_ && own_ != nullptr && !own_->exit_code();
    state_ = serves ? State::Coordinating : State::Done;
    if (serves) send("bye");
    return;
  }
  stops_only_ = false;
  state_ = State::Running;
  unsent_.clear();
  send("gone");
}

void ElasticHost::begin_ending(int signal) {
  state_ = State::Ending;
  deadline_ = Clock::now() + options_.grace.value_or(kElasticGrace);
  send_to_job_processes(signal);
}

void ElasticHost::begin_killing() {
  state_ = State::Killing;
  deadline_ = Clock::now() + kElasticKillWait;
  send_to_job_processes(SIGKILL);
}

/// Signals each process once: some programs take a second signal as an order to hurry.
void ElasticHost::send_to_job_processes(int signal) {
  for (const Rank& rank : ranks_) ::kill(-rank.pid, signal);
  for (const Process& process : descendants()) {
    const bool reached = std::any_of(
        ranks_.begin(), ranks_.end(), [&](const Rank& rank) { return rank.pid == process.group; });
    if (!reached) ::kill(process.pid, signal);
  }
}

/// Writes the rest of the output, at the reader's pace; a second signal stops waiting.
void ElasticHost::finish_output() {
  output_.copy();
  const int signals_before = signals_taken_;
  while (lifeline_is_open_ && !output_.flushed() && signals_taken_ == signals_before) {
    std::vector<pollfd> waited = {{signals_.get(), POLLIN, 0}, {lifeline_, POLLIN, 0}};
    output_.add_to(waited);
    ::poll(waited.data(), waited.size(), -1);
    handle_signals();
    check_lifeline();
    output_.copy();
  }
}

void ElasticHost::send(const std::string& line) { job_.send(line); }

}  // namespace ddp::launch
