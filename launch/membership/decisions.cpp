// The coordinator's decisions after an event; see membership.cpp.
#include <algorithm>
#include <set>
#include <utility>

#include <ddp/internal/membership/reform.h>
#include <ddp/internal/text.h>

#include "launch/membership/membership.h"
#include "launch/texts.h"

namespace ddp::launch {

using namespace membership;

namespace {

constexpr int kAttemptsOfAStep = 3;
constexpr int kMeetingsInARow = 10;

std::string members_text(const std::vector<Place>& places) {
  std::vector<int> slots;
  for (const Place& place : places) slots.push_back(place.slot);
  return str(slots.size(), slots.size() == 1 ? " rank (" : " ranks (", joined_by(", ", slots), ")");
}

}  // namespace

/// Ends a member's connection, and its process where a launcher can kill it.
void Membership::drop_member(Time now, Connection connection, const std::string& why) {
  const Peer peer = *peers_.at(connection);
  peers_.erase(connection);
  orders_.push_back(Send{connection, Fenced{{why}}});
  orders_.push_back(Close{connection});
  if (peer.pid != 0 && launched_) {
    orders_.push_back(Kill{peer.place.slot, peer.pid, peer.host});
    dying_[{peer.place.slot, peer.pid}] = now + limits_.kill;
  }
  const bool trained = phase_ == Phase::Entering || phase_ == Phase::Running;
  if (is_member(peer)) {
    failed_meetings_ = 0;
    dropped_.insert(peer.place.id);
  }
  if (!is_member(peer) || !trained) return proceed(now);
  if (end_if_done()) return;
  if (phase_ == Phase::Running) repeats_.in_step = true;
  gather(now, why);
}

/// Ends a member that left, with exit code 0.
void Membership::let_go(Connection connection) {
  const Peer* peer = peers_.at(connection);
  finished_.insert({peer->place.slot, peer->pid});
  left_.insert(peer->place.id);
  orders_.push_back(Send{connection, End{0, {"this process left"}}});
  orders_.push_back(Close{connection});
  peers_.erase(connection);
}

/// Starts all processes again where no generation was entered: no state exists to continue from.
void Membership::gather(Time now, const std::string& why) {
  if (!state_.established && launched_) return start_again(why);
  ++state_.number;
  remember();
  phase_ = Phase::Gathering;
  since_ = now;
  waits_since_ = now;
  paused_since_.reset();
  done_since_.reset();
  why_ = why;
  for (auto& [connection, peer] : peers_) {
    if (!is_member(peer)) continue;
    peers_.set_stage(peer, Stage::Asked);
    peer.asked = now;
    orders_.push_back(Send{connection, Gather{state_.number, {why}}});
  }
  proceed(now);
}

void Membership::proceed(Time now) {
  switch (phase_) {
    case Phase::Returning:
      return resume(now);
    case Phase::Gathering:
      return try_to_form(now);
    case Phase::Entering:
      return check_entered(now);
    case Phase::Running:
      if (!end_if_done()) check_pauses(now);
      return;
    case Phase::Over:
      return;
  }
}

/// Decides nothing before all members are back, or a majority of them after a while: a second
/// coordinator cannot have a majority, too.
void Membership::resume(Time now) {
  const auto all = static_cast<int>(state_.members.size());
  const int back = peers_.count(Stage::Back);
  const bool may_decide = back == all || (2 * back > all && now >= since_ + limits_.lost_after);
  if (!may_decide) {
    if (now < since_ + limits_.wait) return;
    return finish(
        1,
        str("expected the ", all, " members of generation ", state_.formed, " to come back, got ",
            back, ". If they have ended, start without the file of --state"));
  }
  bool all_train = back == all;
  for (auto& [connection, peer] : peers_) {
    if (peer.stage != Stage::Back) continue;
    all_train = all_train && peer.was_training;
    peers_.set_stage(peer, peer.back_as);
    if (peer.stage == Stage::Paused) paused_since_ = now;
    if (peer.stage == Stage::Done) done_since_ = now;
  }
  if (!all_train || state_.number > state_.formed) {
    return gather(now, "the coordinator started again");
  }
  phase_ = Phase::Running;
  since_ = now;
  change_may_be_due_ = true;
  state_.established = true;
  proceed(now);
}

/// Before the first generation all wait for as many as are wanted: each that comes asks no more.
bool Membership::waits_for_first_ranks(Time now) const {
  const int ready = peers_.count(Stage::Ready);
  return state_.formed == 0 && peers_.count(Stage::Reported) == 0 && ready > 0 &&
         ready < wanted_ranks() && now - waits_since_.value_or(now) < limits_.wait;
}

int Membership::wanted_ranks() const {
  return state_.formed == 0 && limits_.first_ranks > 0 ? limits_.first_ranks : limits_.max_ranks;
}

void Membership::try_to_form(Time now) {
  if (waits_for_first_ranks(now)) return;
  if (peers_.count(Stage::Asked) > 0 || !dying_.empty() || awaits_connection()) return;
  const auto sources = best_sources();
  const bool first = state_.formed == 0;
  if (!first && sources.empty() && !may_go_without_sources()) return go_without_sources();
  if (!let_leavers_go(sources)) return finish(0, "all ranks have left");

  const auto chosen = candidates();
  const auto ranks = static_cast<int>(chosen.size());
  if (ranks == 0) return waits_since_.reset();
  const Time waited = now - waits_since_.value_or(now);
  if (ranks < limits_.min_ranks) {
    if (waited < limits_.wait) return;
    return finish(
        1, str("expected at least ", limits_.min_ranks, " ranks within ",
               seconds_text(limits_.wait), ", got ", ranks));
  }
  if (ranks < wanted_ranks() && waited < (first ? limits_.wait : limits_.hold)) return;
  form(now, chosen, best_sources());
}

/// Where no generation was entered, members begin with the state of the start. One of them is of
/// the generation before, which cannot train without it.
bool Membership::may_go_without_sources() const {
  return !launched_ && !state_.established && peers_.count(Stage::Reported) > 0;
}

void Membership::go_without_sources() {
  if (!first_throw_.empty()) return finish(1, first_throw_);
  start_again(why_);
}

/// A process that leaves stays for one generation more where no other has the last step.
/// \return false when all leave and no process waits to join.
bool Membership::let_leavers_go(const std::vector<Peer*>& sources) {
  const auto stays = [](const Peer* peer) { return !peer->leaves; };
  const bool can_do_without = std::any_of(sources.begin(), sources.end(), stays);
  bool anybody_stays = false;
  for (const auto& [connection, peer] : peers_) {
    const bool takes_part = peer.stage == Stage::Reported || peer.stage == Stage::Ready;
    anybody_stays = anybody_stays || (takes_part && !peer.leaves);
  }
  std::vector<Connection> leavers;
  for (const auto& [connection, peer] : peers_) {
    if (!peer.leaves || peer.stage != Stage::Reported) continue;
    const bool is_source = std::find(sources.begin(), sources.end(), &peer) != sources.end();
    if (!is_source || !anybody_stays || can_do_without) leavers.push_back(connection);
  }
  for (const Connection connection : leavers) let_go(connection);
  return anybody_stays || leavers.empty();
}

void Membership::form(
    Time now, const std::vector<Peer*>& members, const std::vector<Peer*>& sources) {
  Form form;
  if (!sources.empty()) {
    form.applied = sources.front()->report.applied;
    form.turns = sources.front()->report.turns;
  }
  if (is_third_loss_of(form.applied)) {
    return finish(
        1, str("step ", form.applied + 1, " failed ", kAttemptsOfAStep,
               " times; the first time: ", repeats_.first));
  }
  if (state_.formed == 0) ++state_.number;
  form.generation = state_.number;
  joined_.clear();
  const std::set<const Peer*> have_state(sources.begin(), sources.end());
  for (Peer* peer : members) {
    form.members.push_back(peer->place);
    if (have_state.count(peer) > 0) form.sources.push_back(peer->place.id);
    if (peer->stage == Stage::Ready) joined_ += str(joined_.empty() ? "" : ", ", peer->place.slot);
    peers_.set_stage(*peer, Stage::Placed);
    peer->announced = false;
    peer->accused_by.clear();
  }
  const Form before = std::exchange(form_, form);
  store_.clear();
  state_.formed = form.generation;
  state_.members = form.members;
  remember();
  phase_ = Phase::Entering;
  since_ = now;
  send_form(members, before);
}

/// Tells members that have the form before only what has changed: to tell each of n members all n
/// is 50 MB for 1,024.
void Membership::send_form(const std::vector<Peer*>& members, const Form& before) {
  const auto change = change_of(before, form_);
  for (const Peer* peer : members) {
    const bool has_it = before.generation > 0 && peer->report.generation == form_.generation &&
                        peer->report.form == before.generation;
    if (has_it) {
      orders_.push_back(Send{peer->connection, change});
    } else {
      orders_.push_back(Send{peer->connection, form_});
    }
  }
}

bool Membership::is_third_loss_of(int64_t step) {
  if (!std::exchange(repeats_.in_step, false)) return false;
  if (step != repeats_.step) {
    repeats_.step = step;
    repeats_.losses = 0;
    repeats_.first = why_;
  }
  return ++repeats_.losses == kAttemptsOfAStep;
}

/// Counts a meeting that failed though no member was lost, and ends the job after many in a row:
/// what hinders them stays.
bool Membership::is_meeting_hopeless(const std::string& why) {
  if (++failed_meetings_ < kMeetingsInARow) return false;
  finish(
      1,
      str("the ranks failed to meet ", kMeetingsInARow, " times in a row; the last time: ", why));
  return true;
}

void Membership::check_entered(Time now) {
  const int entered =
      peers_.count(Stage::Training) + peers_.count(Stage::Paused) + peers_.count(Stage::Done);
  if (entered < static_cast<int>(state_.members.size())) return;
  phase_ = Phase::Running;
  failed_meetings_ = 0;
  const bool begins = !std::exchange(state_.established, true);
  if (begins) remember();
  say_generation(now, begins);
  since_ = now;
  change_may_be_due_ = true;
  waits_since_.reset();
  first_throw_.clear();
  proceed(now);  // some may be done, or pause already
}

void Membership::check_pauses(Time now) {
  const int paused = peers_.count(Stage::Paused);
  const bool all = paused + peers_.count(Stage::Done) == peers_.members();
  // A member that had begun its next step before Change arrived waits in that step for the paused
  // members, and repeats the step.
  if (paused > 0 && (all || now >= *paused_since_ + limits_.pause)) {
    return gather(now, "a planned change");
  }
  ask_for_change();
}

/// \return whether all members are done.
bool Membership::end_if_done() {
  const int done = peers_.count(Stage::Done);
  if (done == 0 || done < peers_.members()) return false;
  for (const auto& [connection, peer] : peers_) {
    if (is_member(peer)) finished_.insert({peer.place.slot, peer.pid});
    orders_.push_back(Send{connection, End{0, {"the job is done"}}});
  }
  finish(0, "");
  return true;
}

/// Sends Change to the members once for each process that waits or leaves.
void Membership::ask_for_change() {
  if (!std::exchange(change_may_be_due_, false)) return;
  bool due = false;
  const bool has_room = peers_.members() < limits_.max_ranks;
  for (auto& [connection, peer] : peers_) {
    const bool wants = peer.leaves || (peer.stage == Stage::Ready && has_room);
    due = due || (wants && !std::exchange(peer.announced, true));
  }
  if (due) send_to_members(Change{});
}

void Membership::refuse(Connection connection, const CoordinatorMessage& why) {
  orders_.push_back(Send{connection, why});
  orders_.push_back(Close{connection});
}

void Membership::finish(int code, const std::string& why) {
  if (code != 0) {
    for (const auto& [connection, peer] : peers_) {
      orders_.push_back(Send{connection, End{code, {why}}});
    }
  }
  phase_ = Phase::Over;
  orders_.push_back(Finish{code, why});
}

void Membership::start_again(const std::string& why) {
  if (!launched_) {
    return finish(1, str("expected a rank that has the state, got none that is left: ", why));
  }
  phase_ = Phase::Over;
  orders_.push_back(StartAgain{why});
}

void Membership::send_to_members(const CoordinatorMessage& message) {
  for (const auto& [connection, peer] : peers_) {
    if (is_member(peer)) orders_.push_back(Send{connection, message});
  }
}

void Membership::say_generation(Time now, bool begins) {
  auto text = str("generation ", state_.formed, ": ", members_text(state_.members));
  int64_t step = 0;
  for (const auto& [connection, peer] : peers_) step = std::max(step, peer.report.applied);
  text += begins ? std::string(" begin") : str(" go on from step ", step);
  if (!begins && !joined_.empty()) text += "; joined: " + joined_;
  orders_.push_back(Say{text + " (" + seconds_text(now - waits_since_.value_or(since_)) + ")"});
}

std::vector<Peer*> Membership::best_sources() {
  std::vector<Peer*> best;
  const auto order = [](const Peer& peer) {
    return std::make_pair(peer.report.applied, peer.report.turns);
  };
  for (auto& [connection, peer] : peers_) {
    if (peer.stage != Stage::Reported || peer.report.holding != Holding::Whole) continue;
    if (!best.empty() && order(peer) < order(*best.front())) continue;
    if (!best.empty() && order(*best.front()) < order(peer)) best.clear();
    best.push_back(&peer);
  }
  return best;
}

/// Chooses members that reported first, then waiting processes; returns them in the order of slots.
std::vector<Peer*> Membership::candidates() {
  std::vector<Peer*> chosen;
  for (auto& [connection, peer] : peers_) {
    if (peer.stage == Stage::Reported || peer.stage == Stage::Ready) chosen.push_back(&peer);
  }
  const auto by_slot = [](const Peer* a, const Peer* b) { return a->place.slot < b->place.slot; };
  std::sort(chosen.begin(), chosen.end(), by_slot);
  std::stable_sort(chosen.begin(), chosen.end(), [](const Peer* a, const Peer* b) {
    return a->stage == Stage::Reported && b->stage != Stage::Reported;
  });
  if (static_cast<int>(chosen.size()) > limits_.max_ranks) {
    chosen.resize(static_cast<size_t>(limits_.max_ranks));
  }
  std::sort(chosen.begin(), chosen.end(), by_slot);
  return chosen;
}

/// While members are expected back, their slots are theirs.
int Membership::free_slot() const {
  const auto is_kept = [this](int slot) {
    return phase_ == Phase::Returning &&
           std::any_of(state_.members.begin(), state_.members.end(), [slot](const Place& place) {
             return place.slot == slot;
           });
  };
  int slot = 0;
  while (peers_.has_slot(slot) || is_kept(slot)) ++slot;
  return slot;
}

Membership::Time Membership::report_limit(const Peer& peer) const {
  const auto accusers = static_cast<int>(peer.accused_by.size());
  const auto waits_for_accused = [](const auto& entry) {
    return entry.second.stage != Stage::Asked || !entry.second.accused_by.empty();
  };
  // The first accusation stops the others, so that they make none of their own.
  const bool is_last = accusers > 0 && std::all_of(peers_.begin(), peers_.end(), waits_for_accused);
  const bool hangs = is_last || 2 * accusers >= std::max(1, peers_.members() - 1);
  return peer.asked + (hangs ? std::min(limits_.accused, limits_.report) : limits_.report);
}

}  // namespace ddp::launch
