#include "launch/job/job.h"

#include <algorithm>
#include <csignal>
#include <stdexcept>
#include <utility>

#include <ddp/internal/membership/line_channel.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "launch/environment.h"
#include "launch/processes/signals.h"
#include "launch/texts.h"

namespace ddp::launch {

using membership::line_of;

namespace {

constexpr std::chrono::milliseconds kStopLimit(20000);  // after which a launcher counts as lost
constexpr size_t kDeathsInARow = 3;
constexpr std::chrono::seconds kDeathsWithin(10);
constexpr std::chrono::milliseconds kLastWords(30000);  // ranks may save what they have

}  // namespace

Job::Job(
    const LaunchOptions& options, std::string token, Wires wires, Time now,
    std::optional<Remembered> remembered)
    : options_(options),
      token_(std::move(token)),
      wires_(std::move(wires)),
      start_(now),
      now_(now) {
  if (hosts_that_agree(options_) > 1 && !options_.elastic) state_ = State::Joining;
  renew(std::move(remembered));
  if (membership_) membership_->set_launched(false);
}

/// A new port, so that connections left over from an earlier attempt cannot reach this one.
void Job::renew(std::optional<Remembered> remembered) {
  code_ = 0;
  notices_.clear();
  if (options_.elastic) membership_.emplace(limits(), now_, std::move(remembered));
  const bool is_given = !options_.elastic && hosts_that_agree(options_) == 1;
  port_ = is_given && options_.master_port != 0 ? options_.master_port : wires_.new_port();
}

MembershipLimits Job::limits() const {
  const ElasticOptions& elastic = *options_.elastic;
  MembershipLimits limits;
  limits.slots = world_size(options_);
  limits.max_ranks = elastic.max_ranks;
  limits.min_ranks = elastic.min_ranks;
  const int first = elastic.first_ranks > 0 ? elastic.first_ranks : elastic.max_ranks;
  limits.first_ranks = std::max(elastic.min_ranks, first - static_cast<int>(leaving_.size()));
  limits.lost_after = elastic.lost_after;
  limits.wait = elastic.wait;
  limits.hold = elastic.hold;
  return limits;
}

void Job::on_closed(Time now, Client client) {
  now_ = now;
  closed_.erase(client);
  if (members_.erase(client) > 0 && membership_) {
    membership_->on_closed(now, client);
    return apply_orders();
  }
  const auto launcher = launchers_.find(client);
  if (launcher == launchers_.end()) return;
  const int node = launcher->second.node;
  launchers_.erase(launcher);
  if (state_ == State::Joining) return;
  ++lost_launchers_;
  count_launchers();
  const bool goes_on = membership_ && (membership_->established() || state_ == State::Draining);
  if (state_ != State::Over && !goes_on) {
    const int code = state_ == State::Stopping ? code_ : 1;
    say_of_another_host(client);
    return finish(code, str("the ddprun of node ", node, " is gone"));
  }
  finish_if_all_ended();
}

void Job::on_time(Time now) {
  now_ = now;
  if (state_ == State::Joining && now >= start_ + options_.join_timeout) {
    return finish(1, text_of_missing());
  }
  if (state_ == State::Stopping && now >= stop_deadline_) {
    for (const auto& [client, launcher] : launchers_) {
      if (!launcher.ending) continue;
      return finish(code_, str("the ddprun of node ", launcher.node, " is gone"));
    }
  }
  if (!membership_) return;
  membership_->on_time(now);
  apply_orders();
}

std::optional<Job::Time> Job::next_time() const {
  if (state_ == State::Joining) return start_ + options_.join_timeout;
  if (state_ == State::Stopping) return stop_deadline_;
  return membership_ ? membership_->next_time() : std::nullopt;
}

std::string Job::text_of_missing() const {
  auto text =
      str("expected ", options_.nodes, " hosts within ", in_words(options_.join_timeout), ", got ",
          launchers_.size(), ". ");
  if (refused_ids_.empty()) return text + "Start ddprun on the others.";
  return text + str("Others came with the --rdzv-id '", joined_by("', '", refused_ids_),
                    "', and here it is '", token_, "': give all hosts of a job the same.");
}

void Job::begin_attempts() {
  const bool all = options_.elastic.has_value();
  for (auto& [client, launcher] : launchers_) {
    if (restarts_ > 0) {
      const auto ranks = all ? "all ranks" : count_of(launcher.ranks, "rank");
      wires_.send(
          client, str("say restart ", restarts_, " of ", options_.max_restarts, ": starting ",
                      ranks, " again"));
    }
    begin_attempt(client);
  }
}

void Job::begin_attempt(Client client) {
  Launcher& launcher = launchers_.at(client);
  launcher.starting = true;
  if (options_.rendezvous) {
    const auto& ranks = options_.ranks_of_nodes;  // empty: the same on all
    wires_.send(client, str("node ", launcher.node, " ", joined_by(" ", ranks)));
  }
  wires_.send(client, str("start ", restarts_, " ", port_));
}

void Job::take_from_launcher(Client client, const std::string& line) {
  Launcher& launcher = launchers_.at(client);
  InputText words(line);
  std::string word;
  words >> word;
  if (word == "started") {
    int rank = 0, pid = 0;
    if (words >> rank >> pid) launcher.running[rank] = pid;
    if (state_ == State::Draining) end_those_that_came_late();
    leaving_.erase(rank);  // its host came back
    launcher.starting = false;
  } else if (word == "exited") {
    Exit exit;
    words >> exit.rank >> exit.pid >> exit.code >> exit.asked >> std::ws;
    if (std::getline(words, exit.how)) on_exited(client, exit);
  } else if (word == "gone") {
    launcher.running.clear();
    launcher.starting = launcher.ending = false;
    begin_again_if_all_gone();
  } else if (word == "signal") {
    int signal = 0;
    if (words >> signal) on_signal(client, signal);
  } else if (word == "notice") {
    int signal = 0;
    if (words >> signal) notices_.insert(signal);
  } else if (word == "bye") {
    launchers_.erase(client);
    count_launchers();
    begin_again_if_all_gone();
    finish_if_all_ended();
  }
}

std::string Job::Exit::report() const {
  return (pid == 0 ? str("rank ", rank) : rank_with_pid(rank, pid)) + " " + how;
}

void Job::on_exited(Client client, const Exit& exit) {
  auto& running = launchers_.at(client).running;
  const auto known = running.find(exit.rank);
  // One that outlived SIGKILL may end when another one has its place. Of an elastic job's host that
  // was cut off, this may be the first word of it.
  const bool is_known = known != running.end() && known->second == exit.pid;
  if (exit.pid == 0) launchers_.at(client).starting = false;
  if (!is_known && (known != running.end() || !membership_)) return;
  if (is_known) running.erase(known);
  if (state_ == State::Stopping || state_ == State::Over) {
    if (exit.code != 0 && !exit.asked && !leaves(exit)) {
      wires_.send(client, "say " + exit.report());
    }
  } else if (membership_) {
    on_member_exited(client, exit);
  } else if (exit.code != 0) {
    fail(client, exit);
  } else {
    finish_if_all_ended();
  }
}

void Job::on_member_exited(Client client, const Exit& exit) {
  const bool has_finished = membership_->has_finished(exit.rank, exit.pid);
  const bool came_late = state_ == State::Draining && !has_finished;
  if (came_late) return finish_if_all_ended();
  const bool speaks = membership_->generation() > 0;
  const bool as_expected = exit.code == 0 && (!speaks || has_finished);
  const bool established = membership_->established();
  membership_->on_exited(now_, exit.rank, exit.pid, exit.how);
  apply_orders();
  if (state_ == State::Stopping || state_ == State::Over) return;

  const bool leaves = leaving_.count(exit.rank) > 0 || launchers_.at(client).leaving;
  if (exit.code != 0 && (state_ == State::Draining || leaves)) {
    if (code_ == 0) code_ = exit.code;
    tell(exit.report() + (leaves ? "" : "; the job is done, so no other one is started"));
  } else if (!as_expected && state_ == State::Training && !leaves) {
    return established ? replace(client, exit) : fail(client, exit);
  }
  finish_if_all_ended();
}

void Job::replace(Client client, const Exit& exit) {
  const bool loops = dies_again_and_again(exit.rank);
  if (!loops && restarts_ < options_.max_restarts) {
    ++restarts_;
    launchers_.at(client).starting = true;
    send_to_launchers(
        str("say ", exit.report(), "; starting another one (", restarts_, " of ",
            options_.max_restarts, ")"));
    return wires_.send(client, str("replace ", exit.rank, " ", restarts_, " ", port_));
  }
  const auto why = loops ? std::string("it failed three times in 10 seconds")
                         : str("no restart of ", options_.max_restarts, " is left");
  tell(str(exit.report(), "; its place stays empty: ", why));
  if (running() >= options_.elastic->min_ranks) return;
  finish(
      exit.code == 0 ? 1 : exit.code, str("expected at least ", options_.elastic->min_ranks,
                                          " ranks, got ", running(), ", and none can be replaced"));
}

bool Job::dies_again_and_again(int rank) {
  auto& deaths = deaths_[rank];
  deaths.push_back(now_);
  if (deaths.size() > kDeathsInARow) deaths.erase(deaths.begin());
  return deaths.size() == kDeathsInARow && now_ - deaths.front() <= kDeathsWithin;
}

/// The signal ends a rank that has no handler for it yet.
bool Job::leaves(const Exit& exit) const {
  return !notices_.empty() && (exit.code == kLeftCode || notices_.count(exit.code - 128) > 0);
}

/// A rank left after SIGUSR1 or SIGUSR2 to a ddprun, and the others leave with it. They would only
/// be told again where they are.
void Job::let_leave(Client client, const Exit& exit) {
  wires_.send(client, "say " + exit.report() + "; the job leaves and is not started again");
  finish(kLeftCode, "", options_.grace.value_or(kLastWords).count());
}

/// A rank failed, and takes the attempt with it.
void Job::fail(Client client, const Exit& exit) {
  if (leaves(exit)) return let_leave(client, exit);
  const auto others = static_cast<int>(launchers_.at(client).running.size());
  auto report = exit.report();
  if (others > 0) report += "; ending the other " + count_of(others, "rank");
  wires_.send(client, "say " + report);
  say_of_another_host(client);
  start_all_again(exit.code);
}

void Job::start_all_again(int code) {
  if (code == 0) code = 1;  // a member left without an error before it was done
  if (lost_launchers_ > 0 || launchers_.empty()) {
    return finish(code, "processes that may still run cannot be started again");
  }
  if (restarts_ >= options_.max_restarts) {
    return finish(
        code, restarts_ == 0 ? "" : str("gave up: no restart of ", restarts_, " is left"));
  }
  ++restarts_;
  state_ = State::Stopping;
  code_ = code;
  membership_.reset();
  remember({});
  for (const Client member : std::exchange(members_, {})) close(member);
  stop_deadline_ = now_ + options_.grace.value_or(kGraceAfterSignal) + kStopLimit;
  for (auto& [client, launcher] : launchers_) {
    launcher.starting = false;
    launcher.ending = true;
  }
  send_to_launchers("stop");
}

/// Once no launcher has a process any more.
void Job::begin_again_if_all_gone() {
  if (state_ != State::Stopping) return;
  for (const auto& [other, launcher] : launchers_) {
    if (launcher.ending) return;
  }
  if (launchers_.empty()) return finish(1, "no host is left");
  state_ = State::Training;
  renew();
  begin_attempts();
}

/// SIGTERM asks members that train to leave; everything else ends the job.
void Job::on_signal(Client client, int signal) {
  const bool trains = state_ == State::Training && membership_ && membership_->established();
  if (signal == SIGTERM && trains) {
    Launcher& launcher = launchers_.at(client);
    launcher.leaving = true;
    for (const auto& [rank, pid] : launcher.running) {
      leaving_.insert(rank);
      membership_->on_leave_wanted(now_, rank);
    }
    return apply_orders();
  }
  if (state_ == State::Joining || state_ == State::Over) return;
  // The failure of an attempt that is being ended came first.
  const int code = state_ == State::Stopping ? code_ : 128 + signal;
  say_of_another_host(client);
  const auto why = str("node ", launchers_.at(client).node, " ended the job with code ", code);
  finish(code, why, /*limit_ms=*/0, client);
}

/// To the launchers but for that of the host which ends the attempt.
void Job::say_of_another_host(Client origin) {
  if (state_ == State::Stopping) return;  // start_all_again() has sent "stop"
  for (const auto& [client, launcher] : launchers_) {
    // It may have started more ranks than it could tell.
    const bool has_ranks = launcher.starting || !launcher.running.empty();
    if (client == origin || !has_ranks) continue;
    wires_.send(client, "say another host ended the attempt; ending the ranks of this one");
  }
}

/// \param limit_ms  for processes that were asked to end by themselves.
/// \param origin  a launcher that has printed the reason already.
void Job::finish(int code, const std::string& why, int64_t limit_ms, std::optional<Client> origin) {
  state_ = State::Over;
  exit_code_ = code;
  if (!why.empty()) wires_.say(why);
  for (const auto& [client, launcher] : launchers_) {
    wires_.send(client, str("finish ", code, " ", limit_ms, " ", client == origin ? "" : why));
  }
}

/// Once nothing runs and nothing is being started.
void Job::finish_if_all_ended() {
  if (state_ != State::Training && state_ != State::Draining) return;
  for (const auto& [client, launcher] : launchers_) {
    if (launcher.starting || !launcher.running.empty()) return;
  }
  const bool has_ranks = !only_coordinates(options_);
  const bool all_came = has_ranks && seen_launchers_ >= hosts_that_agree(options_);
  if (state_ == State::Draining || all_came) finish(code_, "");
}

void Job::apply_orders() {
  if (!membership_ || state_ == State::Over) return;
  for (const auto& order : membership_->take_orders()) {
    if (const auto* send = std::get_if<Membership::Send>(&order)) {
      const bool forms = std::holds_alternative<membership::Form>(send->message) ||
                         std::holds_alternative<membership::Reform>(send->message);
      if (forms) send_reachable_address(send->to);
      wires_.send(send->to, line_of(send->message));
    } else if (const auto* close = std::get_if<Membership::Close>(&order)) {
      members_.erase(close->connection);
      this->close(close->connection);
    } else if (const auto* kill = std::get_if<Membership::Kill>(&order)) {
      for (const auto& [client, launcher] : launchers_) {
        const auto running = launcher.running.find(kill->slot);
        const bool its = running != launcher.running.end() && running->second == kill->pid;
        if (its) wires_.send(client, str("kill ", kill->slot, " ", kill->pid));
      }
    } else if (const auto* remember = std::get_if<Membership::Remember>(&order)) {
      this->remember(remember->state);
    } else if (const auto* say = std::get_if<Membership::Say>(&order)) {
      tell(say->text);
    } else if (const auto* again = std::get_if<Membership::StartAgain>(&order)) {
      tell(again->why);
      return start_all_again(1);
    } else if (const auto* over = std::get_if<Membership::Finish>(&order)) {
      if (over->code != 0) return finish(over->code, over->why, kLastWords.count());
      state_ = State::Draining;
      end_those_that_came_late();
      finish_if_all_ended();
    }
  }
}

/// Goes on without it, because the ranks need no file: a coordinator that is started again does.
void Job::remember(const Remembered& state) {
  std::string error;
  try {
    wires_.remember(state);
  } catch (const std::runtime_error& failed) {
    error = failed.what();
  }
  const bool is_new = !error.empty() && error != remember_error_;
  remember_error_ = error;
  if (!is_new) return;
  tell(
      str(error,
          ". The job goes on, and a coordinator that is started again would not know "
          "generation ",
          state.formed, ". Make room: each new generation is written again"));
}

/// Gives a member that reached this process over loopback a routable address of this host: it
/// would publish 127.0.0.1 as its store's address, and other hosts would connect to themselves.
void Job::send_reachable_address(Client member) {
  if (!membership::is_loopback_host(wires_.reached_at(member))) return;
  for (const Client other : members_) {
    const auto host = wires_.reached_at(other);
    if (host.empty() || membership::is_loopback_host(host)) continue;
    return wires_.send(member, line_of(CoordinatorMessage(membership::Reached{host})));
  }
}

/// Kills processes that joined no generation before the members were done.
void Job::end_those_that_came_late() {
  for (const auto& [client, launcher] : launchers_) {
    for (const auto& [rank, pid] : launcher.running) {
      if (membership_->has_finished(rank, pid)) continue;
      wires_.send(client, str("kill ", rank, " ", pid));
    }
  }
}

void Job::count_launchers() {
  if (membership_) membership_->set_launched(!launchers_.empty());
}

int Job::running() const {
  int all = 0;
  for (const auto& [client, launcher] : launchers_) {
    all += static_cast<int>(launcher.running.size()) + (launcher.starting ? 1 : 0);
  }
  return all;
}

/// To the users of all hosts.
void Job::tell(const std::string& text) {
  wires_.say(text);
  send_to_launchers("say " + text);
}

void Job::send_to_launchers(const std::string& line) {
  for (const auto& [client, launcher] : launchers_) wires_.send(client, line);
}

}  // namespace ddp::launch
