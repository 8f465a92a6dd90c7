#include "launch/elastic/elastic_job.h"

#include <algorithm>
#include <csignal>
#include <utility>

#include <ddp/internal/membership/line_channel.h>
#include <ddp/internal/text.h>

#include "launch/processes/signals.h"

namespace ddp::launch {

using membership::line_of;
using membership::message_of;

namespace {

constexpr size_t kDeathsInARow = 3;
constexpr std::chrono::seconds kDeathsWithin(10);
constexpr std::chrono::milliseconds kLastWords(30000);  // ranks may save what they have

/// The part of a line after its first `words` words.
std::string rest_after(const std::string& line, int words) {
  size_t at = 0;
  for (; words > 0 && at != std::string::npos; --words) at = line.find(' ', at + (at > 0 ? 1 : 0));
  return at == std::string::npos || at + 1 > line.size() ? "" : line.substr(at + 1);
}

std::string first_word(const std::string& line) { return line.substr(0, line.find(' ')); }

}  // namespace

ElasticJob::ElasticJob(
    const LaunchOptions& options, std::string token, Wires wires, Time now,
    std::optional<Remembered> remembered)
    : options_(options), token_(std::move(token)), wires_(std::move(wires)) {
  membership_.emplace(limits(), now, std::move(remembered));
  membership_->set_launched(false);
  port_ = wires_.new_port();
}

MembershipLimits ElasticJob::limits() const {
  const ElasticOptions& elastic = *options_.elastic;
  MembershipLimits limits;
  limits.slots = options_.nodes * options_.local_ranks;
  limits.max_ranks = elastic.max_ranks;
  limits.min_ranks = elastic.min_ranks;
  limits.first_ranks =
      std::max(elastic.min_ranks, elastic.max_ranks - static_cast<int>(leaving_.size()));
  limits.lost_after = elastic.lost_after;
  limits.wait = elastic.wait;
  limits.hold = elastic.hold;
  return limits;
}

void ElasticJob::on_line(Time now, Client client, const std::string& line) {
  if (launchers_.count(client) > 0) return take_from_launcher(now, client, line);
  if (first_word(line) == "host") return admit_launcher(client, line);
  const auto message = message_of<MemberMessage>(line);
  if (!message) return wires_.close(client);
  std::string token = token_;
  if (const auto* hello = std::get_if<membership::Hello>(&*message)) token = hello->token;
  if (const auto* back = std::get_if<membership::Back>(&*message)) token = back->token;
  if (token != token_ || !membership_) return wires_.close(client);
  if (state_ == State::Draining || state_ == State::Over) {
    wires_.send(client, line_of(CoordinatorMessage(membership::End{0, {"the job is done"}})));
    return wires_.close(client);
  }
  members_.insert(client);
  membership_->on_message(now, client, *message);
  obey_membership(now);
}

void ElasticJob::on_closed(Time now, Client client) {
  if (members_.erase(client) > 0 && membership_) {
    membership_->on_closed(now, client);
    return obey_membership(now);
  }
  const auto launcher = launchers_.find(client);
  if (launcher == launchers_.end()) return;
  launchers_.erase(launcher);
  ++lost_launchers_;
  count_launchers();
  if (state_ == State::Stopping || (state_ == State::Training && !membership_->established())) {
    return finish(1, "a host's ddprun is gone");
  }
  finish_if_all_ended();
}

void ElasticJob::on_time(Time now) {
  if (!membership_) return;
  membership_->on_time(now);
  obey_membership(now);
}

std::optional<ElasticJob::Time> ElasticJob::next_time() const {
  return membership_ ? membership_->next_time() : std::nullopt;
}

void ElasticJob::admit_launcher(Client client, const std::string& line) {
  InputText words(line);
  std::string word, token;
  Launcher launcher;
  int held = 0;
  if (!(words >> word >> token >> launcher.ranks >> held) || token != token_) {
    return wires_.close(client);
  }
  launcher.starting = held == 0;
  launchers_[client] = launcher;
  ++seen_launchers_;
  count_launchers();
  if (held > 0) lost_launchers_ = std::max(0, lost_launchers_ - 1);
  if (state_ == State::Over) return wires_.send(client, str("finish ", *exit_code_, " 0 "));
  if (state_ == State::Training && held == 0) begin_attempt(client);
}

void ElasticJob::begin_attempt(Client client) {
  launchers_.at(client).starting = true;
  wires_.send(client, str("start ", restarts_, " ", port_));
}

void ElasticJob::take_from_launcher(Time now, Client client, const std::string& line) {
  Launcher& launcher = launchers_.at(client);
  const auto word = first_word(line);
  InputText words(line);
  std::string ignored;
  words >> ignored;
  int first = 0;
  if (word == "exited") return on_exited(now, launcher, line);
  if (word == "gone") return on_gone(now, client);
  if (word == "started") {
    int pid = 0;
    if (words >> first >> pid) launcher.running[first] = pid;
    if (state_ == State::Draining) end_those_that_came_late();
    leaving_.erase(first);  // its host came back
    launcher.starting = false;
  } else if (word == "signal" && words >> first) {
    on_signal(now, client, first);
  } else if (word == "bye") {
    launchers_.erase(client);
    count_launchers();
    begin_again_if_all_gone(now);
    finish_if_all_ended();
  }
}

void ElasticJob::on_exited(Time now, Launcher& launcher, const std::string& line) {
  InputText words(line);
  std::string word;
  int slot = 0, pid = 0, code = 0;
  if (!(words >> word >> slot >> pid >> code)) return;
  const auto how = rest_after(line, 4);
  launcher.running.erase(slot);
  if (state_ == State::Stopping || state_ == State::Over) return;
  const bool speaks = membership_->generation() > 0;
  const bool as_expected = code == 0 && (!speaks || membership_->has_finished(slot, pid));
  const bool established = membership_->established();
  const bool came_late = state_ == State::Draining && !membership_->has_finished(slot, pid);
  if (came_late) return finish_if_all_ended();
  membership_->on_exited(now, slot, pid, how);
  obey_membership(now);
  if (state_ == State::Stopping || state_ == State::Over) return;

  const auto report = str("rank ", slot, " (pid ", pid, ") ", how);
  if (code != 0 && (state_ == State::Draining || leaving_.count(slot) > 0)) {
    if (code_ == 0) code_ = code;
    tell(report);
  } else if (!as_expected && state_ == State::Training && leaving_.count(slot) == 0) {
    if (!established) return start_all_again(now, report, code);
    for (auto& [client, one] : launchers_) {
      if (&one == &launcher) return replace(now, client, slot, report, code);
    }
  }
  finish_if_all_ended();
}

void ElasticJob::replace(Time now, Client client, int slot, const std::string& report, int code) {
  const bool loops = dies_again_and_again(now, slot);
  if (!loops && restarts_ < options_.max_restarts) {
    ++restarts_;
    launchers_.at(client).starting = true;
    send_to_launchers(str(
        "say ", report, "; starting another one (", restarts_, " of ", options_.max_restarts, ")"));
    return wires_.send(client, str("replace ", slot, " ", restarts_, " ", port_));
  }
  const auto why = loops ? std::string("it failed three times in 10 seconds")
                         : str("no restart of ", options_.max_restarts, " is left");
  tell(str(report, "; its place stays empty: ", why));
  if (running() < options_.elastic->min_ranks) {
    finish(
        code == 0 ? 1 : code, str("expected at least ", options_.elastic->min_ranks, " ranks, got ",
                                  running(), ", and none can be replaced"));
  }
}

bool ElasticJob::dies_again_and_again(Time now, int slot) {
  auto& deaths = deaths_[slot];
  deaths.push_back(now);
  if (deaths.size() > kDeathsInARow) deaths.erase(deaths.begin());
  return deaths.size() == kDeathsInARow && now - deaths.front() <= kDeathsWithin;
}

void ElasticJob::start_all_again(Time /*now*/, const std::string& report, int code) {
  if (!report.empty()) tell(report);
  if (lost_launchers_ > 0 || launchers_.empty()) {
    return finish(code == 0 ? 1 : code, "processes that may still run cannot be started again");
  }
  if (restarts_ >= options_.max_restarts) {
    return finish(
        code == 0 ? 1 : code,
        restarts_ == 0 ? "" : str("gave up: no restart of ", restarts_, " is left"));
  }
  ++restarts_;
  state_ = State::Stopping;
  membership_.reset();
  wires_.remember({});
  for (const Client member : std::exchange(members_, {})) wires_.close(member);
  tell(str("restart ", restarts_, " of ", options_.max_restarts, ": starting all ranks again"));
  for (auto& [client, launcher] : launchers_) launcher.starting = true;
  send_to_launchers("stop");
}

/// A launcher has no process any more.
void ElasticJob::on_gone(Time now, Client client) {
  launchers_.at(client).running.clear();
  launchers_.at(client).starting = false;
  begin_again_if_all_gone(now);
}

void ElasticJob::begin_again_if_all_gone(Time now) {
  if (state_ != State::Stopping) return;
  for (const auto& [other, launcher] : launchers_) {
    if (launcher.starting) return;
  }
  if (launchers_.empty()) return finish(1, "no host is left");
  state_ = State::Training;
  membership_.emplace(limits(), now);
  port_ = wires_.new_port();
  for (const auto& entry : launchers_) begin_attempt(entry.first);
}

/// SIGTERM asks ranks that train to leave; everything else ends the job.
void ElasticJob::on_signal(Time now, Client client, int signal) {
  if (signal == SIGTERM && state_ == State::Training && membership_->established()) {
    for (const auto& [slot, pid] : launchers_.at(client).running) {
      leaving_.insert(slot);
      membership_->on_leave_wanted(now, slot);
    }
    return obey_membership(now);
  }
  if (state_ != State::Over) finish(128 + signal, "");
}

/// \param limit_ms  for processes that were told, to end by themselves.
void ElasticJob::finish(int code, const std::string& why, int64_t limit_ms) {
  state_ = State::Over;
  exit_code_ = code;
  if (!why.empty()) wires_.say(why);
  send_to_launchers(str("finish ", code, " ", limit_ms, " ", why));
}

/// Once nothing runs and nothing is being started.
void ElasticJob::finish_if_all_ended() {
  if (state_ != State::Training && state_ != State::Draining) return;
  for (const auto& [client, launcher] : launchers_) {
    if (launcher.starting || !launcher.running.empty()) return;
  }
  const bool all_came = options_.command.empty() ? false : seen_launchers_ >= options_.nodes;
  if (state_ == State::Draining || all_came) finish(code_, "");
}

void ElasticJob::obey_membership(Time now) {
  if (!membership_) return;
  for (const auto& order : membership_->take_orders()) {
    if (const auto* send = std::get_if<Membership::Send>(&order)) {
      if (std::holds_alternative<membership::Form>(send->message)) tell_address(send->to);
      wires_.send(send->to, line_of(send->message));
    } else if (const auto* close = std::get_if<Membership::Close>(&order)) {
      members_.erase(close->connection);
      wires_.close(close->connection);
    } else if (const auto* kill = std::get_if<Membership::Kill>(&order)) {
      for (const auto& [client, launcher] : launchers_) {
        const auto running = launcher.running.find(kill->slot);
        const bool its = running != launcher.running.end() && running->second == kill->pid;
        if (its) wires_.send(client, str("kill ", kill->slot, " ", kill->pid));
      }
    } else if (const auto* remember = std::get_if<Membership::Remember>(&order)) {
      wires_.remember(remember->state);
    } else if (const auto* say = std::get_if<Membership::Say>(&order)) {
      tell(say->text);
    } else if (const auto* again = std::get_if<Membership::StartAgain>(&order)) {
      return start_all_again(now, again->why, 1);
    } else if (const auto* over = std::get_if<Membership::Finish>(&order)) {
      if (over->code != 0) return finish(over->code, over->why, kLastWords.count());
      state_ = State::Draining;
      end_those_that_came_late();
      finish_if_all_ended();
    }
  }
}

/// A member on this host that reached this process by a loopback address would tell it the others,
/// and lead each of them to itself.
void ElasticJob::tell_address(Client member) {
  if (!membership::is_loopback_host(wires_.reached_at(member))) return;
  for (const Client other : members_) {
    const auto host = wires_.reached_at(other);
    if (host.empty() || membership::is_loopback_host(host)) continue;
    return wires_.send(member, line_of(CoordinatorMessage(membership::Reached{host})));
  }
}

/// Processes that have not joined the others before these were done have nothing to do.
void ElasticJob::end_those_that_came_late() {
  for (const auto& [client, launcher] : launchers_) {
    for (const auto& [slot, pid] : launcher.running) {
      if (membership_->has_finished(slot, pid)) continue;
      wires_.send(client, str("kill ", slot, " ", pid));
    }
  }
}

void ElasticJob::count_launchers() {
  if (membership_) membership_->set_launched(!launchers_.empty());
}

int ElasticJob::running() const {
  int all = 0;
  for (const auto& [client, launcher] : launchers_) {
    all += static_cast<int>(launcher.running.size()) + (launcher.starting ? 1 : 0);
  }
  return all;
}

/// To the users of all hosts.
void ElasticJob::tell(const std::string& text) {
  wires_.say(text);
  send_to_launchers("say " + text);
}

void ElasticJob::send_to_launchers(const std::string& line) {
  for (const auto& [client, launcher] : launchers_) wires_.send(client, line);
}

}  // namespace ddp::launch
