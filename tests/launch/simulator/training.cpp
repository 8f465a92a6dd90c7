#include "launch/simulator/training.h"

#include <algorithm>

namespace ddp::testing {

void Training::act(Process& process) {
  Member& member = *process.member;
  const int64_t generation = member.generation();
  switch (member.stage()) {
    case Member::Stage::Preparing:
      if (chance_.once_in(5)) member.ready();
      break;
    case Member::Stage::Asked:
      process.stuck_since = chance_.tick;
      if (chance_.once_in(3)) member.report(generation, process.applied, 0, process.holding);
      break;
    case Member::Stage::Placed:
      process.stuck_since = chance_.tick;
      if (member.form().members.front().id == member.id()) member.store("h:1");
      if (!member.store_address().empty() && chance_.once_in(2)) member.met(generation);
      break;
    case Member::Stage::Met:
      enter(process);
      break;
    case Member::Stage::Training:
      train_step(process);
      break;
    default:
      break;
  }
}

/// The others of the generation, as its groups see them.
std::vector<const Process*> Training::others_of(const Process& process) const {
  std::vector<const Process*> others;
  for (const Place& place : process.member->form().members) {
    const auto found = std::find_if(processes_.begin(), processes_.end(), [&](const auto& entry) {
      return entry.second.member->id() == place.id;
    });
    others.push_back(found == processes_.end() ? nullptr : &found->second);
  }
  return others;
}

/// Gives up on a group whose members ended or went on, or which does not get any further.
void Training::give_up_if_broken(Process& process) {
  Member& member = *process.member;
  const bool late = chance_.tick > process.stuck_since + kReportTicks;
  for (size_t rank = 0; rank < member.form().members.size(); ++rank) {
    const Process* other = others_of(process)[rank];
    const bool gone = other == nullptr || other->member->generation() != member.generation();
    const bool hangs = other != nullptr && late &&
                       (chance_.tick < other->hangs_until || chance_.tick < other->stopped_until);
    if ((gone && chance_.once_in(5)) || hangs) {
      return member.lost(
          chance_.now(), member.generation(), {member.form().members[rank].id}, "the group failed");
    }
  }
  if (late) member.lost(chance_.now(), member.generation(), {}, "timeout");
}

void Training::enter(Process& process) {
  Member& member = *process.member;
  const Form& form = member.form();
  bool all_here = true;
  const Process* source = nullptr;
  for (const Process* other : others_of(process)) {
    const bool here = other != nullptr && network_.reaches(process.host, other->host) &&
                      other->member->generation() == form.generation &&
                      other->member->stage() >= Member::Stage::Met &&
                      other->member->stage() != Member::Stage::Over;
    all_here = all_here && here;
    if (here && std::count(form.sources.begin(), form.sources.end(), other->member->id()) > 0) {
      source = other;
    }
  }
  if (!all_here) return give_up_if_broken(process);
  if (!form.sources.empty()) {
    expect(source != nullptr, "a source is a member");
    if (process.holding != Holding::Whole || process.applied < form.applied) {
      if (source->applied != form.applied) return give_up_if_broken(process);  // trains already
      process.state = source->state;
      process.applied = source->applied;
    }
    expect(process.applied == form.applied, "the state is that of the generation");
  }
  process.holding = Holding::Whole;
  process.stuck_since = chance_.tick;
  member.entered(form.generation);
}

void Training::train_step(Process& process) {
  Member& member = *process.member;
  const int64_t generation = member.generation();
  const int64_t step = process.applied + 1;
  if (step > last_step_) return member.done(chance_.now(), generation);
  auto& contributed = contributions_[generation];
  if (contributed[member.id()] < step) {
    if (!chance_.once_in(2)) return;
    contributed[member.id()] = step;
    if (member.change_is_wanted()) pauses_.insert({generation, step});
  }
  const auto others = others_of(process);
  for (size_t rank = 0; rank < others.size(); ++rank) {
    const ProcessId id = member.form().members[rank].id;
    const bool cut = others[rank] != nullptr && !network_.reaches(process.host, others[rank]->host);
    if (contributed[id] < step || cut) return give_up_if_broken(process);
  }
  apply(process, generation, step);
  if (pauses_.count({generation, step}) > 0) member.pause(chance_.now(), generation);
}

/// A process that was left out may still apply, to itself, what the others had contributed to
/// before they stopped: the step that they applied, and the next one.
void Training::apply(Process& process, int64_t generation, int64_t step) {
  if (generation < newest_) expect(++process.late_steps <= 2, "no two generations train at once");
  newest_ = std::max(newest_, generation);
  const auto [before, first] = before_step_.insert({{generation, step}, process.state});
  expect(before->second == process.state, "members have one state");
  if (first) ++steps_;
  process.applied = step;
  process.state =
      process.state * 6364136223846793005U + static_cast<uint64_t>(generation * 1000 + step);
  process.stuck_since = chance_.tick;
}

void Training::begin_again() {
  newest_ = 0;
  contributions_.clear();
  before_step_.clear();
  pauses_.clear();
}

}  // namespace ddp::testing
