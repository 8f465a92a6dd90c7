#include "launch/membership/membership.h"

#include <algorithm>
#include <cstdio>

#include <ddp/internal/text.h>

namespace ddp::launch {

using namespace membership;

namespace {

constexpr int kAttemptsOfAStep = 3;

template <typename Duration>
std::string seconds_text(Duration duration) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", static_cast<double>(duration.count()) / 1000);
  return text;
}

std::string members_text(const std::vector<Place>& places) {
  std::vector<int> slots;
  for (const Place& place : places) slots.push_back(place.slot);
  return str(slots.size(), slots.size() == 1 ? " rank (" : " ranks (", joined_by(", ", slots), ")");
}

}  // namespace

Membership::Membership(const MembershipLimits& limits, Time now, std::optional<Remembered> earlier)
    : limits_(limits), now_(now), since_(now) {
  if (!earlier || earlier->formed == 0) return;
  state_ = *std::move(earlier);
  phase_ = Phase::Returning;
}

void Membership::on_message(Time now, Connection from, const MemberMessage& message) {
  now_ = now;
  if (phase_ == Phase::Over) return;
  if (const auto* hello = std::get_if<Hello>(&message)) return take(now, from, *hello);
  if (const auto* back = std::get_if<Back>(&message)) return take(now, from, *back);
  const auto found = peers_.find(from);
  if (found == peers_.end()) return orders_.push_back(Close{from});
  Peer& peer = found->second;
  peer.heard = now;
  std::visit(
      [&](const auto& line) {
        using Line = std::decay_t<decltype(line)>;
        if constexpr (std::is_same_v<Line, Alive>) {
          orders_.push_back(Send{from, Alive{}});
        } else if constexpr (std::is_same_v<Line, Waits>) {
          take_waits(now, peer);
        } else if constexpr (std::is_same_v<Line, Leaves>) {
          take_leaves(now, peer);
        } else if constexpr (std::is_same_v<Line, Done>) {
          take_done(now, peer);
        } else if constexpr (!std::is_same_v<Line, Hello> && !std::is_same_v<Line, Back>) {
          take(now, peer, line);
        }
      },
      message);
}

void Membership::take(Time now, Connection from, const Hello& hello) {
  const int slot = hello.slot < 0 ? free_slot() : hello.slot;
  if (find(hello.id) != nullptr || !slot_is_free(slot)) {
    const auto text = str("slot ", slot, ": expected one process, got a second one. End the first");
    return refuse(from, End{2, {text}});
  }
  Peer peer;
  peer.place = {hello.id, slot};
  peer.pid = hello.pid;
  peer.host = hello.host;
  peer.connection = from;
  peer.heard = now;
  peers_[from] = peer;
  const bool joins = state_.formed > 0;
  const int size = std::max(limits_.slots, limits_.max_ranks);
  orders_.push_back(
      Send{from, You{slot, size, joins, limits_.lost_after.count(), limits_.wait.count()}});
}

void Membership::take(Time now, Connection from, const Back& back) {
  if (back.generation == 0) {  // it has no state that could be an old one
    return take(now, from, Hello{back.token, back.id, back.slot, back.pid, back.host});
  }
  const Place place = {back.id, back.slot};
  const auto& known = state_.members;
  const bool was_member = std::find(known.begin(), known.end(), place) != known.end();
  if (phase_ != Phase::Returning || !was_member || !slot_is_free(back.slot)) {
    const auto text = str("generation ", state_.number, " goes on without this process");
    return refuse(from, Fenced{{text}});
  }
  Peer peer;
  peer.place = place;
  peer.pid = back.pid;
  peer.host = back.host;
  peer.connection = from;
  peer.heard = now;
  peer.stage = Stage::Back;
  peer.was_training = back.trains && back.generation == state_.formed;
  peers_[from] = peer;
  state_.number = std::max(state_.number, back.generation);
  proceed(now);
}

void Membership::take_waits(Time now, Peer& peer) {
  if (peer.stage != Stage::Preparing) return;
  peer.stage = Stage::Ready;
  if (!waits_since_) waits_since_ = now;
  proceed(now);
}

void Membership::take_leaves(Time now, Peer& peer) {
  peer.leaves = true;
  if (peer.stage < Stage::Back) return let_go(peer.connection);
  proceed(now);
}

void Membership::take_done(Time now, Peer& peer) {
  if (peer.stage != Stage::Training && peer.stage != Stage::Paused) return;
  peer.stage = Stage::Done;
  if (!done_since_) done_since_ = now;
  proceed(now);
}

void Membership::take(Time now, Peer& peer, const Report& report) {
  if (peer.stage != Stage::Asked || report.generation != state_.number) return;
  peer.stage = Stage::Reported;
  peer.report = report;
  proceed(now);
}

/// The group of one member is broken, so the generation cannot go on, whoever is to blame.
void Membership::take(Time now, Peer& peer, const Lost& lost) {
  if (!is_member(peer) || lost.generation != state_.formed || phase_ == Phase::Returning) return;
  Peer* accused = find(lost.id);
  if (accused != nullptr && accused != &peer) accused->accused_by.insert(peer.place.id);
  if (phase_ != Phase::Gathering) gather(now, lost.why.value);
}

void Membership::take(Time now, Peer& peer, const Threw& threw) {
  const auto text = str("rank ", peer.place.slot, " threw: ", threw.why.value);
  if (first_throw_.empty()) first_throw_ = text;
  peer.pid = 0;  // it ends by itself, with its own exit code
  lose(now, peer.connection, text);
}

void Membership::take(Time /*now*/, Peer& peer, const Store& store) {
  if (phase_ != Phase::Entering || store.generation != state_.formed) return;
  if (!(state_.members.front() == peer.place)) return;
  for (const auto& [connection, other] : peers_) {
    if (is_member(other) && &other != &peer) orders_.push_back(Send{connection, store});
  }
}

void Membership::take(Time /*now*/, Peer& peer, const Met& met) {
  if (peer.stage == Stage::Placed && met.generation == state_.formed) peer.stage = Stage::Met;
}

void Membership::take(Time now, Peer& peer, const Entered& entered) {
  if (entered.generation != state_.formed) return;
  if (peer.stage == Stage::Placed || peer.stage == Stage::Met) peer.stage = Stage::Training;
  proceed(now);
}

void Membership::take(Time now, Peer& peer, const Pauses& pauses) {
  if (peer.stage != Stage::Training || pauses.generation != state_.formed) return;
  peer.stage = Stage::Paused;
  if (!paused_since_) paused_since_ = now;
  proceed(now);
}

void Membership::on_closed(Time now, Connection connection) {
  now_ = now;
  const auto peer = peers_.find(connection);
  if (phase_ == Phase::Over || peer == peers_.end()) return;
  lose(now, connection, str("rank ", peer->second.place.slot, " closed its connection"));
}

void Membership::on_exited(Time now, int slot, int pid, const std::string& how) {
  now_ = now;
  dying_.erase({slot, pid});
  if (phase_ == Phase::Over) return;
  for (auto& [connection, peer] : peers_) {
    if (peer.place.slot != slot || peer.pid != pid) continue;
    peer.pid = 0;
    return lose(now, connection, str("rank ", slot, " ", how));
  }
  proceed(now);
}

void Membership::on_leave_wanted(Time now, int slot) {
  now_ = now;
  for (auto& [connection, peer] : peers_) {
    if (phase_ != Phase::Over && peer.place.slot == slot) return take_leaves(now, peer);
  }
}

void Membership::on_time(Time now) {
  now_ = now;
  std::map<Connection, std::string> lost;
  for (const auto& [connection, peer] : peers_) {
    const auto rank = str("rank ", peer.place.slot, " (pid ", peer.pid, ")");
    if (now >= peer.heard + limits_.lost_after) {
      lost[connection] = rank + " is silent for " + seconds_text(limits_.lost_after);
    } else if (peer.stage == Stage::Asked && now >= report_limit(peer)) {
      lost[connection] = rank + " is alive, but its training does not stop";
    } else if (peer.stage == Stage::Placed && now >= since_ + limits_.entry) {
      lost[connection] = rank + " has not met the others within " + seconds_text(limits_.entry);
    } else if (
        done_since_ && is_member(peer) && peer.stage != Stage::Done &&
        now >= *done_since_ + limits_.wait) {
      lost[connection] = rank + " trains on, while others are done";
    }
  }
  for (const auto& [connection, why] : lost) {
    if (peers_.count(connection) == 0 || phase_ == Phase::Over) continue;
    orders_.push_back(Say{why});
    lose(now, connection, why);
  }
  for (auto dying = dying_.begin(); dying != dying_.end();) {
    dying = now >= dying->second ? dying_.erase(dying) : std::next(dying);
  }
  if (phase_ != Phase::Over) proceed(now);
}

std::optional<Membership::Time> Membership::next_time() const {
  std::optional<Time> next;
  const auto consider = [&](Time time) {
    if (time > now_ && (!next || time < *next)) next = time;
  };
  if (phase_ == Phase::Over) return next;
  for (const auto& [connection, peer] : peers_) {
    consider(peer.heard + limits_.lost_after);
    if (peer.stage == Stage::Asked) consider(report_limit(peer));
  }
  for (const auto& [process, until] : dying_) consider(until);
  if (phase_ == Phase::Entering) consider(since_ + limits_.entry);
  if (phase_ == Phase::Returning) consider(since_ + limits_.lost_after);
  if (phase_ == Phase::Returning) consider(since_ + limits_.wait);
  if (paused_since_) consider(*paused_since_ + limits_.pause);
  if (done_since_) consider(*done_since_ + limits_.wait);
  if (waits_since_) {
    consider(*waits_since_ + limits_.hold);
    consider(*waits_since_ + limits_.wait);
  }
  return next;
}

/// Its connection ends, and its process where that can be done.
void Membership::lose(Time now, Connection connection, const std::string& why) {
  const Peer peer = peers_.at(connection);
  peers_.erase(connection);
  orders_.push_back(Send{connection, Fenced{{why}}});
  orders_.push_back(Close{connection});
  if (peer.pid != 0) {
    orders_.push_back(Kill{peer.place.slot, peer.pid, peer.host});
    dying_[{peer.place.slot, peer.pid}] = now + limits_.kill;
  }
  const bool trained = phase_ == Phase::Entering || phase_ == Phase::Running;
  if (!is_member(peer) || !trained) return proceed(now);
  if (end_if_done()) return;
  if (phase_ == Phase::Running) repeats_.in_step = true;
  gather(now, why);
}

/// Politely: it has no part in the job any more.
void Membership::let_go(Connection connection) {
  const auto peer = peers_.find(connection);
  finished_.insert({peer->second.place.slot, peer->second.pid});
  orders_.push_back(Send{connection, End{0, {"this process left"}}});
  orders_.push_back(Close{connection});
  peers_.erase(peer);
}

/// Before a first generation is entered nothing is there that another could go on with.
void Membership::gather(Time now, const std::string& why) {
  if (!state_.established) return start_again(why);
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
    peer.stage = Stage::Asked;
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

/// Decides nothing before all members are back, or a majority of them after a while: another
/// coordinator would see the others.
void Membership::resume(Time now) {
  const auto all = static_cast<int>(state_.members.size());
  const int back = count(Stage::Back);
  const bool may_decide = back == all || (2 * back > all && now >= since_ + limits_.lost_after);
  if (!may_decide) {
    if (now < since_ + limits_.wait) return;
    return finish(
        1, str("expected the ", all, " members of generation ", state_.formed,
               " to come back, got ", back));
  }
  bool all_train = back == all;
  for (auto& [connection, peer] : peers_) {
    if (peer.stage != Stage::Back) continue;
    all_train = all_train && peer.was_training;
    peer.stage = Stage::Training;
  }
  if (!all_train || state_.number > state_.formed) {
    return gather(now, "the coordinator started again");
  }
  phase_ = Phase::Running;
  since_ = now;
  state_.established = true;
  ask_for_change();
}

void Membership::try_to_form(Time now) {
  if (count(Stage::Asked) > 0 || !dying_.empty()) return;
  const auto sources = best_sources();
  const bool first = state_.formed == 0;
  if (!first && sources.empty()) return go_without_sources();
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
  const int wanted = first && limits_.first_ranks > 0 ? limits_.first_ranks : limits_.max_ranks;
  if (ranks < wanted && waited < (first ? limits_.wait : limits_.hold)) return;
  form(now, chosen, best_sources());
}

void Membership::go_without_sources() {
  if (!first_throw_.empty()) return finish(1, first_throw_);
  start_again(why_);
}

/// A process that leaves stays for one generation more where no other has the last step.
/// \return false when all leave and no process is at the door.
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
    const bool is_source = std::find(sources.begin(), sources.end(), &peer) != sources.end();
    const bool is_needed = anybody_stays && !can_do_without && is_source;
    if (peer.leaves && peer.stage == Stage::Reported && !is_needed) leavers.push_back(connection);
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
  for (Peer* peer : members) {
    form.members.push_back(peer->place);
    if (peer->stage == Stage::Ready) joined_ += str(joined_.empty() ? "" : ", ", peer->place.slot);
    peer->stage = Stage::Placed;
    peer->announced = false;
    peer->accused_by.clear();
  }
  for (const Peer* source : sources) form.sources.push_back(source->place.id);
  state_.formed = form.generation;
  state_.members = form.members;
  remember();
  phase_ = Phase::Entering;
  since_ = now;
  for (const Peer* peer : members) orders_.push_back(Send{peer->connection, form});
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

void Membership::check_entered(Time now) {
  const int entered = count(Stage::Training) + count(Stage::Paused) + count(Stage::Done);
  if (entered < static_cast<int>(state_.members.size())) return;
  phase_ = Phase::Running;
  const bool begins = !std::exchange(state_.established, true);
  if (begins) remember();
  say_generation(now, begins);
  since_ = now;
  waits_since_.reset();
  first_throw_.clear();
  proceed(now);  // some may be done, or pause already
}

void Membership::check_pauses(Time now) {
  const int paused = count(Stage::Paused);
  const bool all = paused + count(Stage::Done) == members();
  // Members that had begun their next step before they were told wait in it for those that pause,
  // and repeat it.
  if (paused > 0 && (all || now >= *paused_since_ + limits_.pause)) {
    return gather(now, "a planned change");
  }
  ask_for_change();
}

/// \return whether all members are done.
bool Membership::end_if_done() {
  const int done = count(Stage::Done);
  if (done == 0 || done < members()) return false;
  for (const auto& [connection, peer] : peers_) {
    if (is_member(peer)) finished_.insert({peer.place.slot, peer.pid});
    orders_.push_back(Send{connection, End{0, {"the job is done"}}});
  }
  finish(0, "");
  return true;
}

/// Members are told once for each process that waits or leaves.
void Membership::ask_for_change() {
  bool due = false;
  const bool has_room = members() < limits_.max_ranks;
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

int Membership::count(Stage stage) const {
  return static_cast<int>(std::count_if(peers_.begin(), peers_.end(), [&](const auto& entry) {
    return entry.second.stage == stage;
  }));
}

int Membership::members() const {
  return static_cast<int>(std::count_if(
      peers_.begin(), peers_.end(), [](const auto& entry) { return is_member(entry.second); }));
}

std::vector<Membership::Peer*> Membership::best_sources() {
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

/// Members that reported, and then others by their slots, in the order of ranks.
std::vector<Membership::Peer*> Membership::candidates() {
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

Membership::Peer* Membership::find(ProcessId id) {
  const auto found = std::find_if(peers_.begin(), peers_.end(), [id](const auto& entry) {
    return entry.second.place.id == id;
  });
  return found == peers_.end() ? nullptr : &found->second;
}

bool Membership::slot_is_free(int slot) const {
  return std::none_of(peers_.begin(), peers_.end(), [slot](const auto& entry) {
    return entry.second.place.slot == slot;
  });
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
  while (!slot_is_free(slot) || is_kept(slot)) ++slot;
  return slot;
}

Membership::Time Membership::report_limit(const Peer& peer) const {
  const bool hangs = 2 * static_cast<int>(peer.accused_by.size()) >= std::max(1, members() - 1);
  return peer.asked + (hangs ? std::min(limits_.accused, limits_.report) : limits_.report);
}

}  // namespace ddp::launch
