#include "launch/job/host_loop.h"

#include <algorithm>
#include <csignal>
#include <cstring>
#include <stdexcept>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include <ddp/internal/text.h>

#include "launch/in_program/rank_function.h"
#include "launch/poll_until.h"
#include "launch/processes/signals.h"
#include "launch/texts.h"

namespace ddp::launch {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kGraceToLeave(30000);
constexpr milliseconds kWaitAfterKill(2000);
constexpr milliseconds kKillAgainEvery(20);
constexpr milliseconds kFirstConnectEvery(100);
constexpr milliseconds kConnectEvery(1000);

// The ddprun that started this one by -H is gone, or its client passes no input on.
constexpr const char* kInputEnded =
    "standard input has ended, by which the ddprun that started this one gives orders: taken as "
    "SIGHUP. If that one is still there, its --rsh has to pass input on, as ssh -tt and kubectl "
    "exec -i "
    "do";

/// Where the launcher's own lines go; empty: to stderr.
Output::Lines own_lines_of(const LaunchOptions& options) {
  if (options.function == nullptr) return {};
  return [function = options.function](std::string_view line) { function->note(line); };
}

}  // namespace

HostLoop::HostLoop(
    const LaunchOptions& options, Address coordinator, Coordinator* own, int lifeline)
    : options_(options),
      coordinator_(std::move(coordinator)),
      own_(own),
      lifeline_(lifeline),
      signals_(open_signals(awaited_signals())),
      null_(::open("/dev/null", O_RDONLY | O_CLOEXEC)),
      processes_(/*kills_groups=*/options.elastic.has_value()),
      output_(
          options.calls.json ? STDERR_FILENO : STDOUT_FILENO, STDERR_FILENO, own_lines_of(options)),
      next_connect_(Clock::now()),
      deadline_(Clock::now() + options_.join_timeout) {
  ::signal(SIGPIPE, SIG_IGN);  // a write reports EPIPE
  if (!null_) throw_errno("cannot open /dev/null");
  if (options_.obeys_stdin) orders_.emplace(STDIN_FILENO);
  if (own_ == nullptr) return;
  job_ = own_->local_client();
  introduce();
}

int HostLoop::run() {
  try {
    loop();
  } catch (const std::exception&) {
    // Output of the ranks, also of earlier attempts, is not lost.
    processes_.send(SIGKILL);
    finish_output();
    throw;
  }
  finish();
  return exit_code_;
}

void HostLoop::loop() {
  while (state_ != State::Done) {
    connect();
    wait_for_event();
    handle_signals();
    obey_orders();
    check_lifeline();
    copy_output();
    // Before the coordinator reads: the job gets the cause of a rank's end before its connection's.
    reap_ended();
    report_failed_starts();
    check_stops();
    if (own_ != nullptr) own_->serve();
    follow_job();
    check_connection();
    advance();
  }
}

void HostLoop::finish() {
  job_.send("bye");
  if (own_ != nullptr) {
    // Its lines about the last ranks that ended.
    for (size_t lines = 1; lines > 0;) {
      own_->serve();
      lines = follow_job();
    }
    own_->finish_sending();
  }
  finish_output();
  if (const auto error = output_.log_error()) {
    output_.say(str("the logs are not complete: ", std::strerror(error)));
    output_.copy();
  }
}

void HostLoop::connect() {
  if (answer_deadline_ && Clock::now() >= *answer_deadline_) {
    throw std::runtime_error(
        str("expected node 0's ddprun at ", coordinator_.host, ":", coordinator_.port,
            ", got no word from there in ", in_words(2 * options_.join_timeout),
            ". Another program may have the port: choose another one by --rdzv-endpoint."));
  }
  const bool may_connect = options_.elastic || !has_joined_;
  if (job_ || !may_connect || Clock::now() < next_connect_ || state_ != State::Running) return;
  next_connect_ = Clock::now() + (has_joined_ ? kConnectEvery : kFirstConnectEvery);
  Fd socket = membership::connect_to(coordinator_.host, coordinator_.port);
  if (!socket) {
    if (has_joined_ || Clock::now() < deadline_) return;
    throw std::runtime_error(
        str("cannot reach node 0's ddprun at ", coordinator_.host, ":", coordinator_.port,
            " within ", in_words(options_.join_timeout), ". Start it there, with ",
            options_.elastic ? "--elastic and " : "",
            options_.rendezvous ? "--rdzv-conf is_host=true." : "--node-rank 0."));
  }
  job_ = LineChannel(std::move(socket));
  job_.close_when_peer_is_lost();
  // Node 0 speaks once all hosts are there, within join_timeout of its own start.
  if (!options_.elastic) answer_deadline_ = Clock::now() + 2 * options_.join_timeout;
  introduce();
}

/// Reports which ranks run, and which ended while the connection was lost.
void HostLoop::introduce() {
  const auto held = has_joined_ ? std::max(1, processes_.count()) : 0;
  has_joined_ = true;
  job_.send(
      str("host ", coordinator_.token, " ", options_.elastic ? 1 : 0, " ", options_.node_rank, " ",
          hosts_that_agree(options_), " ", options_.local_ranks, " ", options_.max_restarts, " ",
          held));
  for (const auto& rank : processes_.running())
    job_.send(str("started ", rank.rank, " ", rank.pid));
  for (const auto& line : std::exchange(unsent_, {})) job_.send(line);
}

void HostLoop::wait_for_event() {
  std::vector<pollfd> waited = {{signals_.get(), POLLIN, 0}, {processes_.fd(), POLLIN, 0}};
  if (lifeline_is_open_) waited.push_back({lifeline_, POLLIN, 0});
  if (orders_ && !orders_->ended()) waited.push_back({STDIN_FILENO, POLLIN, 0});
  job_.add_to(waited);
  if (own_ != nullptr) own_->add_to(waited);
  output_.add_to(waited);

  std::optional<Clock::time_point> next = stall_deadline_;
  const auto consider = [&](std::optional<Clock::time_point> time) {
    if (time && (!next || *time < *next)) next = time;
  };
  if (state_ == State::Running && !job_) consider(next_connect_);
  consider(answer_deadline_);
  if (state_ == State::Killing) consider(Clock::now() + kKillAgainEvery);
  for (const auto& failed : failed_starts_) consider(failed.report_at);
  const bool has_deadline = state_ != State::Running && state_ != State::Coordinating;
  if (has_deadline) consider(deadline_);
  if (own_ != nullptr) consider(own_->next_time());
  poll_until(waited, next);
}

void HostLoop::handle_signals() {
  while (const auto signal = next_signal(signals_.get())) {
    if (*signal == SIGWINCH) {
      output_.resize();
    } else if (*signal != SIGCHLD) {  // SIGCHLD only wakes the loop
      on_signal(*signal);
    }
  }
}

void HostLoop::obey_orders() {
  if (!orders_ || orders_->ended()) return;
  const auto awaits_end = [this] { return state_ == State::Running || next_ == Next::StartAgain; };
  for (const auto& order : orders_->take()) {
    if (order.signal > 0) {
      on_signal(order.signal);
    } else if (awaits_end()) {
      output_.say("another host ended the job; ending " + count_of(processes_.count(), "rank"));
      exit_code_ = 128 + SIGTERM;
      job_.send(str("signal ", SIGTERM));
      if (std::exchange(next_, Next::Exit) == Next::Exit) {
        begin_ending(SIGTERM, grace_or(kGraceAfterFailure));
      }
    }
  }
  const bool ends = state_ == State::Ending || state_ == State::Killing || state_ == State::Done;
  // The client that carried the orders is gone, as a terminal that hangs up.
  if (orders_->ended() && (!ends || next_ == Next::StartAgain)) on_signal(SIGHUP);
}

void HostLoop::on_signal(int signal) {
  // A terminal hangs up and ends: one event.
  if (orders_ && signal == SIGHUP && std::exchange(hung_up_, true)) return;
  const bool is_asked_to_end = !is_only_forwarded(signal);
  if (is_asked_to_end) ++signals_taken_;
  const bool ends = state_ == State::Ending || state_ == State::Killing;
  if (ends && next_ == Next::StartAgain && is_asked_to_end) job_.send(str("signal ", signal));
  if (state_ == State::Killing || state_ == State::Done) return;
  if (state_ == State::Ending) {
    if (signal != SIGINT) return send_to_ranks(signal);
    output_.say("got SIGINT while ending; killing " + processes_.names());
    return begin_killing();
  }

  const bool may_leave = options_.elastic && state_ == State::Running && job_;
  if (is_asked_to_end) {
    if (state_ == State::Running) job_.send(str("signal ", signal));
    if (state_ != State::Finishing) exit_code_ = 128 + signal;
    if (signal == SIGTERM && may_leave) return begin_leaving();
  }
  const int ranks = processes_.count();
  const bool has_lost_input = signal == SIGHUP && orders_ && orders_->ended();
  output_.say(
      (has_lost_input ? std::string(kInputEnded) : "got " + signal_name(signal)) +
      (ranks > 0 ? "; passing it on to " + count_of(ranks, "rank") : ""));
  if (!is_asked_to_end) {
    job_.send(str("notice ", signal));  // before a rank can end by it
    return send_to_ranks(signal);
  }
  next_ = Next::Exit;
  begin_ending(signal, grace_or(kGraceAfterSignal));
}

void HostLoop::check_lifeline() {
  if (!lifeline_is_open_) return;
  pollfd lifeline = {lifeline_, POLLIN, 0};
  if (::poll(&lifeline, 1, 0) <= 0) return;
  lifeline_is_open_ = false;
  if (state_ == State::Running || next_ == Next::StartAgain) {
    exit_code_ = 128 + SIGKILL;
    job_.send(str("signal ", SIGKILL));
  }
  next_ = Next::Exit;
  output_.say("was killed itself; killing " + processes_.names());
  begin_killing();
}

void HostLoop::copy_output() {
  output_.copy();
  if (output_.error() == 0 || state_ != State::Running) return;
  exit_code_ = 128 + SIGPIPE;
  job_.send(str("signal ", SIGPIPE));
  output_.say(
      str("cannot write the ranks' output: ", std::strerror(output_.error()), "; ending ",
          count_of(processes_.count(), "rank")));
  begin_ending(SIGTERM, grace_or(kGraceAfterFailure));
}

void HostLoop::reap_ended() {
  for (const auto& [rank, status] : processes_.reap()) {
    output_.drain(rank.output);
    const int code = exit_code_of(status);
    const bool ends = state_ == State::Ending || state_ == State::Killing;
    const bool asked = was_asked(code);
    if (options_.function != nullptr && state_ == State::Running && code != 0) {
      options_.function->note_failure({rank.rank, rank.pid, status});
    }
    if (ends && code != 0 && !asked) {
      output_.say(rank_with_pid(rank.rank, rank.pid) + " " + describe_end(status));
    }
    const auto line =
        str("exited ", rank.rank, " ", rank.pid, " ", code, " ", asked || ends ? 1 : 0, " ",
            describe_end(status));
    if (job_) {
      job_.send(line);
    } else {
      unsent_.push_back(line);
    }
  }
}

/// Whether a rank that ended with `code` was asked to end.
bool HostLoop::was_asked(int code) const {
  if (state_ == State::Leaving || state_ == State::Finishing) return true;
  return std::count(sent_signals_.begin(), sent_signals_.end(), code - 128) > 0;
}

void HostLoop::check_stops() {
  for (const auto& [rank, signal] : processes_.take_stops()) {
    output_.say(
        str(rank_with_pid(rank.rank, rank.pid), " was stopped by signal ", signal, " (",
            signal_name(signal), ")"));
  }
}

/// \return the number of lines.
size_t HostLoop::follow_job() {
  const auto lines = job_.exchange();
  if (!lines.empty()) answer_deadline_.reset();
  for (const auto& line : lines) follow(line);
  return lines.size();
}

void HostLoop::follow(const std::string& line) {
  InputText words(line);
  std::string word;
  words >> word;
  int first = 0, second = 0, third = 0;
  if (word == "say") {
    output_.copy();  // the ranks' lines come before the job's line about the ranks
    output_.say(line.substr(word.size() + 1));
  } else if (word == "node" && words >> first) {
    options_.node_rank = first;
    options_.ranks_of_nodes.clear();
    while (words >> second) options_.ranks_of_nodes.push_back(second);
  } else if (word == "start" && words >> first >> second && state_ == State::Running) {
    sent_signals_.clear();
    for (int local = 0; local < options_.local_ranks; ++local) start(local, {first, second});
  } else if (word == "replace" && words >> first >> second >> third && state_ == State::Running) {
    replace(first, {second, third});
  } else if (word == "kill" && words >> first >> second) {
    processes_.kill(first, second);
  } else if (word == "stop" && (state_ == State::Running || state_ == State::Leaving)) {
    if (state_ == State::Running) next_ = Next::StartAgain;
    begin_ending(SIGTERM, grace_or(kGraceAfterFailure));
  } else if (word == "finish" && words >> first >> second) {
    std::string text;
    if (std::getline(words >> std::ws, text)) output_.say(text);
    on_finish(first, milliseconds(second));
  }
}

void HostLoop::on_finish(int code, milliseconds limit) {
  if (state_ == State::Running || next_ == Next::StartAgain) exit_code_ = code;
  next_ = Next::Exit;
  if (state_ != State::Running && state_ != State::Leaving) return;
  state_ = State::Finishing;
  deadline_ = Clock::now() + limit;
}

/// Only ranks of an elastic job continue without a coordinator, until it is started again.
void HostLoop::check_connection() {
  if (job_ || !has_joined_) return;
  const bool awaits_job = state_ == State::Running || next_ == Next::StartAgain;
  if (options_.node_rank < 0) {
    if (state_ != State::Running) return;
    output_.say(
        str("node 0's ddprun at ", coordinator_.host, ":", coordinator_.port,
            " closed the connection: expected the same --rdzv-id on all hosts, got '",
            coordinator_.token, "' here"));
  } else if (options_.elastic) {
    if (state_ != State::Running || processes_.count() > 0) return;
    output_.say("lost the coordinator, and no rank is left");
  } else {
    if (!awaits_job) return;
    output_.say("lost node 0's ddprun at " + options_.master_addr);
  }
  exit_code_ = 1;
  next_ = Next::Exit;
  if (state_ == State::Running) begin_ending(SIGTERM, grace_or(kGraceAfterFailure));
}

void HostLoop::advance() {
  const bool is_due = Clock::now() >= deadline_;
  switch (state_) {
    case State::Running:
      end_stall();
      break;
    case State::Leaving:
    case State::Finishing:
      // Processes that the ranks left running in the background end with them.
      if (processes_.count() == 0 || is_due) begin_ending(SIGTERM, grace_or(kGraceAfterFailure));
      break;
    case State::Coordinating:
      if (own_->exit_code()) state_ = State::Done;
      break;
    case State::Ending:
      if (!processes_.any_left() || !is_due) break;
      output_.say("the grace period is over; killing " + processes_.names());
      begin_killing();
      break;
    case State::Killing:
      // Kill again: a process may have forked while the signals were sent.
      send_to_ranks(SIGKILL);
      // The guard reports the processes that cannot be killed now.
      if (is_due) return on_all_gone();
      break;
    case State::Done:
      break;
  }
  const bool ends = state_ == State::Ending || state_ == State::Killing;
  if (ends && !processes_.any_left()) on_all_gone();
}

/// Ends a job whose last ranks are stopped: nothing else can, but the coordinator of an elastic
/// job. It does not kill them at once, as a user who stopped the whole job may be resuming one
/// process after the other.
void HostLoop::end_stall() {
  const int left = processes_.count();
  const bool may_stall = !options_.elastic && left > 0 && left < options_.local_ranks;
  if (!may_stall || !processes_.all_are_stopped()) {
    stall_deadline_.reset();
  } else if (!stall_deadline_) {
    stall_deadline_ = Clock::now() + grace_or(kGraceAfterFailure);
  } else if (Clock::now() >= *stall_deadline_) {
    stall_deadline_.reset();
    output_.say("all other ranks have ended; killing " + processes_.names() + ", which is stopped");
    for (const auto& rank : processes_.running()) processes_.kill(rank.rank, rank.pid);
  }
}

void HostLoop::on_all_gone() {
  switch (std::exchange(next_, Next::Exit)) {
    case Next::StartAgain:
      state_ = State::Running;
      unsent_.clear();
      processes_.forget();  // what outlived SIGKILL is no rank any more
      return job_.send("gone");
    case Next::Coordinate:
      state_ = own_ != nullptr && !own_->exit_code() ? State::Coordinating : State::Done;
      if (state_ == State::Coordinating) job_.send("bye");
      return;
    case Next::Exit:
      state_ = State::Done;
      return;
  }
}

void HostLoop::begin_leaving() {
  output_.say("got SIGTERM; the ranks leave after their step");
  state_ = State::Leaving;
  next_ = Next::Coordinate;
  deadline_ = Clock::now() + grace_or(kGraceToLeave);
}

void HostLoop::begin_ending(int signal, milliseconds grace) {
  stall_deadline_.reset();
  state_ = State::Ending;
  deadline_ = Clock::now() + grace;
  send_to_ranks(signal);
}

void HostLoop::begin_killing() {
  stall_deadline_.reset();
  state_ = State::Killing;
  deadline_ = Clock::now() + kWaitAfterKill;
  send_to_ranks(SIGKILL);
}

void HostLoop::send_to_ranks(int signal) {
  if (std::count(sent_signals_.begin(), sent_signals_.end(), signal) == 0) {
    sent_signals_.push_back(signal);
  }
  processes_.send(signal);
}

/// Writes the rest of the output; a second signal stops waiting for the reader.
void HostLoop::finish_output() {
  const int signals_before = signals_taken_;
  output_.write_rest({{signals_.get(), POLLIN, 0}, {lifeline_, POLLIN, 0}}, [&] {
    handle_signals();
    check_lifeline();
    return lifeline_is_open_ && signals_taken_ == signals_before;
  });
}

milliseconds HostLoop::grace_or(milliseconds by_default) const {
  return options_.grace.value_or(by_default);
}

}  // namespace ddp::launch
