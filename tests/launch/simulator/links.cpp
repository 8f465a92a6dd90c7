#include "launch/simulator/links.h"

#include <algorithm>
#include <stdexcept>

#include <ddp/internal/text.h>

namespace ddp::testing {

using namespace ddp::membership;
using launch::MembershipLimits;

namespace {

int log2_of(int ranks) {
  int rounds = 0;
  while ((1 << rounds) < ranks) ++rounds;
  return rounds;
}

template <typename Message>
Message read_line(const std::string& line) {
  auto read = message_of<Message>(line);
  if (!read) throw std::runtime_error("expected a line, got " + line.substr(0, 80));
  return *std::move(read);
}

}  // namespace

LinkedJob::LinkedJob(int ranks, const Links& links)
    : links_(links),
      rounds_to_meet_(log2_of(ranks)),
      machine_(limits_of(ranks), std::chrono::milliseconds(0)) {
  for (int slot = 0; slot < ranks; ++slot) join(slot);
}

MembershipLimits LinkedJob::limits_of(int ranks) {
  MembershipLimits limits;
  limits.slots = limits.max_ranks = limits.first_ranks = ranks;
  limits.min_ranks = ranks - 1;
  return limits;
}

std::chrono::milliseconds LinkedJob::now() const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(now_);
}

void LinkedJob::after(Time delay, std::function<void()> run) {
  events_.push({now_ + delay, static_cast<int64_t>(events_.size()), std::move(run)});
}

LinkedJob::Time LinkedJob::crossed(Time& free_at, size_t bytes) const {
  const auto rate = links_.bytes_per_us;
  if (rate == 0) return links_.latency;
  free_at = std::max(free_at, now_) + links_.line + Time(static_cast<int64_t>(bytes) / rate);
  return free_at - now_ + links_.latency;
}

void LinkedJob::join(int slot) {
  const int connection = ++last_connection_;
  const auto id = static_cast<ProcessId>(connection) << 40;  // as long as random ones
  const Hello hello{"t", id, slot, 100 + connection, "h"};
  auto& member = members_.try_emplace(connection, hello, now()).first->second;
  member.on_connected(now());
  obey_member(connection);
}

void LinkedJob::lose(int slot) {
  const auto lost = std::find_if(members_.begin(), members_.end(), [&](const auto& entry) {
    return entry.second.you()->slot == slot;
  });
  const ProcessId id = lost->second.id();
  const int pid = 100 + lost->first;
  members_.erase(lost);
  for (auto& [connection, member] : members_) {
    member.lost(now(), member.generation(), {id}, "a connection was closed by its peer");
    obey_member(connection);
  }
  after(links_.latency, [this, slot, pid] {
    machine_.on_exited(now(), slot, pid, "was killed by signal 9 (SIGKILL)");
    obey_machine();
  });
}

LinkedJob::Time LinkedJob::settle() {
  const Time begin = now_;
  bytes_ = 0;
  while (!events_.empty()) {
    const Event event = events_.top();
    events_.pop();
    now_ = event.at;
    event.run();
  }
  if (!all_train()) throw std::runtime_error("expected all members to train, got some that wait");
  return now_ - begin;
}

bool LinkedJob::all_train() const {
  return std::all_of(members_.begin(), members_.end(), [&](const auto& entry) {
    return entry.second.stage() == Stage::Training &&
           entry.second.generation() == machine_.generation() &&
           entry.second.form().members.size() == members_.size();
  });
}

void LinkedJob::obey_machine() {
  for (const auto& order : machine_.take_orders()) {
    if (std::holds_alternative<Membership::Finish>(order) ||
        std::holds_alternative<Membership::StartAgain>(order)) {
      throw std::runtime_error("expected a job that goes on, got its end");
    }
    const auto* send = std::get_if<Membership::Send>(&order);
    if (send == nullptr) continue;
    auto line = line_of(send->message);
    bytes_ += static_cast<int64_t>(line.size() + 1);
    after(crossed(out_free_, line.size()), [this, to = send->to, line = std::move(line)] {
      const auto member = members_.find(to);
      if (member == members_.end()) return;
      member->second.on_message(now(), read_line<CoordinatorMessage>(line));
      act(to);
    });
  }
  const auto before = machine_.peers().visits();
  (void)machine_.next_time();
  const auto passed = machine_.peers().visits() - before;
  looked_at_ += passed;
  most_looked_at_ = std::max(most_looked_at_, passed);
}

void LinkedJob::obey_member(int connection) {
  for (const auto& order : members_.at(connection).take_orders()) {
    const auto* send = std::get_if<Member::Send>(&order);
    if (send == nullptr) continue;
    auto line = line_of(send->message);
    after(crossed(in_free_, line.size()), [this, connection, line = std::move(line)] {
      machine_.on_message(now(), connection, read_line<MemberMessage>(line));
      obey_machine();
    });
  }
}

void LinkedJob::act(int connection) {
  Member& member = members_.at(connection);
  const auto generation = member.generation();
  switch (member.stage()) {
    case Stage::Preparing:
      member.ready();
      break;
    case Stage::Asked:
      member.report(generation, generation, 0, Holding::Whole);
      break;
    case Stage::Placed:
      if (member.form().members.front().id == member.id()) member.store("host:12345");
      if (member.store_address().empty()) break;
      after(links_.latency * rounds_to_meet_, [this, connection, generation] {
        const auto here = members_.find(connection);
        if (here == members_.end()) return;
        here->second.met(generation);
        here->second.entered(generation);
        obey_member(connection);
      });
      break;
    case Stage::Training:
      if (member.change_is_wanted()) member.pause(now(), generation);
      break;
    default:
      break;
  }
  obey_member(connection);
}

}  // namespace ddp::testing
