#include "launch/simulator/network.h"

namespace ddp::testing {
namespace {

constexpr int kBreaksInARow = 2;  // of a process's connections
constexpr int64_t kTicksOfBreaks = 40;

template <typename Message>
Message read_again(const Message& message) {
  const auto line = line_of(message);
  auto read = message_of<Message>(line);
  expect(read.has_value() && line_of(*read) == line, "a line can be read: " + line);
  return *read;
}

/// Loses some of the last messages, or all.
template <typename Message>
void lose_some(Queue<Message>& messages, Chance& chance) {
  messages.resize(static_cast<size_t>(chance.below(static_cast<int64_t>(messages.size()) + 1)));
}

}  // namespace

bool Network::connect(Process& process) {
  const bool is_due = process.wants_connection && chance_.tick >= process.connects_at;
  if (!is_due || is_cut(process.host)) return false;
  process.wants_connection = false;
  process.connection = ++last_connection_;
  links_[process.connection] = {process.pid, process.host, {}, false};
  process.inbox.clear();
  process.close_seen = false;
  return true;
}

Network::Link* Network::whole_link_of(const Process& process) {
  const auto link = links_.find(process.connection);
  return link == links_.end() || link->second.is_broken ? nullptr : &link->second;
}

void Network::follow_orders(Process& process) {
  for (const auto& order : process.member->take_orders()) {
    Link* link = whole_link_of(process);
    if (const auto* send = std::get_if<Member::Send>(&order)) {
      if (link != nullptr) link->outbox.push_back({chance_.later(), send->message});
    } else if (std::holds_alternative<Member::Connect>(order)) {
      process.wants_connection = true;
      process.connects_at = chance_.tick + chance_.below(5);
    } else if (std::holds_alternative<Member::Disconnect>(order)) {
      if (link != nullptr) link->outbox.push_back({chance_.later(), std::nullopt});
      process.connection = 0;
      process.close_seen = false;
    }
  }
}

void Network::receive(Process& process) {
  if (is_cut(process.host)) return;
  auto& messages = process.inbox;
  while (!messages.empty() && messages.front().first <= chance_.tick) {
    process.member->on_message(chance_.now(), messages.front().second);
    messages.pop_front();
  }
  if (process.close_seen && messages.empty()) {
    process.close_seen = false;
    process.connection = 0;
    process.member->on_disconnected(chance_.now());
  }
}

void Network::hang_up(const Process& process) {
  const auto link = links_.find(process.connection);
  if (link != links_.end()) link->second.outbox.push_back({chance_.later(), std::nullopt});
}

std::vector<int> Network::connections() const {
  std::vector<int> names;
  for (const auto& [name, link] : links_) names.push_back(name);
  return names;
}

std::optional<Network::Arrival> Network::take(int connection) {
  const auto link = links_.find(connection);
  if (link == links_.end() || is_cut(link->second.host)) return std::nullopt;
  auto& messages = link->second.outbox;
  if (messages.empty() || messages.front().first > chance_.tick) return std::nullopt;
  Arrival arrival{messages.front().second};
  messages.pop_front();
  if (arrival.message) {
    arrival.message = read_again<MemberMessage>(*arrival.message);
  } else {
    links_.erase(link);
  }
  return arrival;
}

void Network::send(int connection, const CoordinatorMessage& message) {
  const auto link = links_.find(connection);
  if (link == links_.end() || link->second.is_broken) return;
  const auto process = processes_.find(link->second.pid);
  if (process == processes_.end()) return;
  process->second.inbox.push_back({chance_.later(), read_again<CoordinatorMessage>(message)});
}

void Network::close(int connection) {
  const auto link = links_.find(connection);
  if (link == links_.end()) return;
  const auto process = processes_.find(link->second.pid);
  const bool is_its = process != processes_.end() && !link->second.is_broken &&
                      process->second.connection == connection;
  if (is_its) process->second.close_seen = true;
  links_.erase(link);
}

void Network::drop_all() {
  for (auto& [pid, process] : processes_) process.close_seen = process.connection != 0;
  links_.clear();
}

void Network::break_connection(Process& process, int64_t side) {
  Link* link = whole_link_of(process);
  if (link == nullptr) return;
  if (chance_.tick > process.broke_at + kTicksOfBreaks) process.breaks = 0;
  if (++process.breaks > kBreaksInARow) return;
  process.broke_at = chance_.tick;
  ++breaks_;
  link->is_broken = true;
  const int64_t late = side == 1 ? chance_.below(60) : 0;
  auto& sent = link->outbox;
  if (chance_.once_in(2)) lose_some(sent, chance_);
  for (auto& [tick, message] : sent) tick += late;
  if (side != 1 || chance_.once_in(2)) {
    sent.push_back({chance_.later() + late + chance_.below(4), std::nullopt});
  }
  lose_some(process.inbox, chance_);
  process.close_seen = process.close_seen || side != 2;
}

void Network::begin_again() {
  links_.clear();
  cut_until_ = 0;
}

}  // namespace ddp::testing
