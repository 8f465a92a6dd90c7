// Events: messages, ends of connections and processes, time. See decisions.cpp for the decisions,
// and returns.cpp for processes that come back.
#include "launch/membership/membership.h"

#include <algorithm>

#include <ddp/internal/text.h>

#include "launch/texts.h"

namespace ddp::launch {

using namespace membership;

namespace {

// So often it looks at the time while it has processes, and by that notices that it did not run.
constexpr Membership::Time kLookEvery(500);

/// The process that a line introduces; nothing: it goes on with what came before.
std::optional<ProcessId> introduced_by(const MemberMessage& message) {
  if (const auto* hello = std::get_if<Hello>(&message)) return hello->id;
  if (const auto* back = std::get_if<Back>(&message)) return back->id;
  return std::nullopt;
}

}  // namespace

Membership::Membership(const MembershipLimits& limits, Time now, std::optional<Remembered> earlier)
    : limits_(limits), now_(now), since_(now) {
  if (!earlier || earlier->formed == 0) return;
  state_ = *std::move(earlier);
  phase_ = Phase::Returning;
}

void Membership::on_message(Time now, Connection from, const MemberMessage& message) {
  pass_until(now);
  if (phase_ == Phase::Over) return;
  Peer* known = peers_.at(from);
  const auto introduced = introduced_by(message);
  // The line was read before its connection was closed.
  if (known != nullptr && known->away_since) return orders_.push_back(Close{from});
  if (known != nullptr && introduced && *introduced != known->place.id) {
    return refuse_second_process(now, *known);
  }
  if (const auto* hello = std::get_if<Hello>(&message)) return take(now, from, *hello);
  if (const auto* back = std::get_if<Back>(&message)) return take(now, from, *back);
  if (known == nullptr) return orders_.push_back(Close{from});
  Peer& peer = *known;
  peer.heard = now;
  std::visit(
      [&](const auto& line) {
        using Line = std::decay_t<decltype(line)>;
        constexpr bool is_first = std::is_same_v<Line, Hello> || std::is_same_v<Line, Back>;
        if constexpr (!is_first) take(now, peer, line);
      },
      message);
}

void Membership::take(Time now, Connection from, const Hello& hello) {
  if (Peer* known = peers_.find(hello.id)) return take_again(now, *known, from, hello);
  if (dropped_.count(hello.id) > 0) return refuse(from, Fenced{{without_it()}});
  if (left_.count(hello.id) > 0) return refuse(from, End{0, {"this process left"}});
  const int slot = hello.slot < 0 ? free_slot() : hello.slot;
  if (!make_way(now, slot)) return;
  if (peers_.has_slot(slot)) {
    const auto text = str("slot ", slot, ": expected one process, got a second one. End the first");
    return refuse(from, End{2, {text}});
  }
  Peer peer;
  peer.place = {hello.id, slot};
  peer.pid = hello.pid;
  peer.host = hello.host;
  peer.connection = from;
  peer.heard = now;
  greet(peer);
  peers_.add(std::move(peer));
}

std::string Membership::without_it() const {
  return str("generation ", state_.number, " goes on without this process");
}

void Membership::greet(const Peer& peer) {
  const bool joins = state_.established;  // before, none has a state that it could get
  const int size = std::max(limits_.slots, limits_.max_ranks);
  const auto lost_after = limits_.lost_after.count();
  orders_.push_back(
      Send{peer.connection, You{peer.place.slot, size, joins, lost_after, limits_.wait.count()}});
}

void Membership::take(Time now, Connection from, const Back& back) {
  if (back.generation == 0) {  // it has no state that could be an old one
    return take(now, from, Hello{back.token, back.id, back.slot, back.pid, back.host});
  }
  if (Peer* known = peers_.find(back.id)) {
    Peer& peer = move(now, *known, from);
    if (phase_ != Phase::Returning) return repeat_to(peer);
    peers_.erase(from);  // it says anew where it stands
  } else if (left_.count(back.id) > 0) {
    return refuse(from, End{0, {"this process left"}});
  }
  const Place place = {back.id, back.slot};
  const auto& members = state_.members;
  const bool was_member = std::find(members.begin(), members.end(), place) != members.end();
  if (phase_ != Phase::Returning || !was_member || peers_.has_slot(back.slot)) {
    const auto text =
        state_.formed == 0
            ? std::string("the coordinator was started again without what --state keeps")
            : without_it();
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
  peers_.add(std::move(peer));
  state_.number = std::max(state_.number, back.generation);
  proceed(now);
}

void Membership::take(Time /*now*/, Peer& peer, const Alive& alive) {
  orders_.push_back(Send{peer.connection, alive});
}

void Membership::take(Time now, Peer& peer, const Waits& /*waits*/) {
  if (peer.stage != Stage::Preparing) return;
  peers_.set_stage(peer, Stage::Ready);
  change_may_be_due_ = true;
  if (!waits_since_) waits_since_ = now;
  proceed(now);
}

void Membership::take(Time now, Peer& peer, const Leaves& /*leaves*/) {
  peer.leaves = change_may_be_due_ = true;
  if (peer.stage < Stage::Back) return let_go(peer.connection);
  proceed(now);
}

void Membership::take(Time now, Peer& peer, const Done& /*done*/) {
  if (peer.stage == Stage::Back) peer.back_as = Stage::Done;
  if (peer.stage != Stage::Training && peer.stage != Stage::Paused) return;
  peers_.set_stage(peer, Stage::Done);
  if (!done_since_) done_since_ = now;
  proceed(now);
}

void Membership::take(Time now, Peer& peer, const Report& report) {
  if (peer.stage != Stage::Asked || report.generation != state_.number) return;
  peers_.set_stage(peer, Stage::Reported);
  peer.report = report;
  proceed(now);
}

/// Ends the generation, because one member's group is broken, whichever rank caused it.
void Membership::take(Time now, Peer& peer, const Lost& lost) {
  if (!is_member(peer) || lost.generation != state_.formed || phase_ == Phase::Returning) return;
  accuse(now, peer.place.id, lost.accused);
  if (phase_ == Phase::Over || lost.generation != state_.formed) return;
  if (phase_ == Phase::Entering && is_meeting_hopeless(lost.why.value)) return;
  if (phase_ != Phase::Gathering) gather(now, lost.why.value);
}

/// One that is away as well has ended, and is not waited for.
void Membership::accuse(Time now, ProcessId by, const std::vector<ProcessId>& accused) {
  for (const ProcessId id : accused) {
    Peer* peer = peers_.find(id);
    if (peer == nullptr || id == by) continue;
    peer->accused_by.insert(by);
    if (peer->away_since) drop_member(now, peer->connection, closed_text(*peer));
    if (phase_ == Phase::Over) return;
  }
}

void Membership::take(Time now, Peer& peer, const Threw& threw) {
  const auto text = str("rank ", peer.place.slot, " threw: ", threw.why.value);
  // While all members begin, the same exception may be about to come from every one of them.
  const bool has_not_entered = peer.stage == Stage::Placed || peer.stage == Stage::Met;
  const bool begins = phase_ == Phase::Entering && !state_.established && !launched_;
  if (begins && has_not_entered) return finish(1, text);
  if (first_throw_.empty()) first_throw_ = text;
  peer.pid = 0;  // it ends by itself, with its own exit code
  drop_member(now, peer.connection, text);
}

void Membership::take(Time /*now*/, Peer& peer, const Store& store) {
  if (phase_ != Phase::Entering || store.generation != state_.formed) return;
  if (!(state_.members.front() == peer.place)) return;
  store_ = store.address;
  for (const auto& [connection, other] : peers_) {
    if (is_member(other) && &other != &peer) orders_.push_back(Send{connection, store});
  }
}

void Membership::take(Time /*now*/, Peer& peer, const Met& met) {
  const bool meets = peer.stage == Stage::Placed && met.generation == state_.formed;
  if (meets) peers_.set_stage(peer, Stage::Met);
}

void Membership::take(Time now, Peer& peer, const Entered& entered) {
  if (entered.generation != state_.formed) return;
  const bool enters = peer.stage == Stage::Placed || peer.stage == Stage::Met;
  if (enters) peers_.set_stage(peer, Stage::Training);
  proceed(now);
}

void Membership::take(Time now, Peer& peer, const Pauses& pauses) {
  if (peer.stage == Stage::Back) peer.back_as = Stage::Paused;
  if (peer.stage != Stage::Training || pauses.generation != state_.formed) return;
  peers_.set_stage(peer, Stage::Paused);
  if (!paused_since_) paused_since_ = now;
  proceed(now);
}

void Membership::on_closed(Time now, Connection connection) {
  pass_until(now);
  Peer* peer = peers_.at(connection);
  if (phase_ != Phase::Over && peer != nullptr) peer->away_since = now;
}

void Membership::on_exited(Time now, int slot, int pid, const std::string& how) {
  pass_until(now);
  dying_.erase({slot, pid});
  if (phase_ == Phase::Over) return;
  Peer* peer = peers_.holder_of(slot);
  if (peer == nullptr || peer->pid != pid) return proceed(now);
  peer->pid = 0;
  drop_member(now, peer->connection, str("rank ", slot, " ", how));
}

void Membership::on_leave_wanted(Time now, int slot) {
  pass_until(now);
  Peer* peer = peers_.holder_of(slot);
  if (phase_ != Phase::Over && peer != nullptr) take(now, *peer, Leaves{});
}

void Membership::on_time(Time now) {
  pass_until(now);
  look_by_ = now + kLookEvery;
  std::map<Connection, std::string> lost;
  for (const auto& [connection, peer] : peers_) {
    const auto rank = [&one = peer] { return rank_with_pid(one.place.slot, one.pid); };
    if (now >= peer.heard + limits_.lost_after) {
      lost[connection] = rank() + " is silent for " + seconds_text(limits_.lost_after);
    } else if (peer.away_since && now >= *peer.away_since + limits_.back) {
      lost[connection] = closed_text(peer);
    } else if (peer.stage == Stage::Asked && now >= report_limit(peer)) {
      lost[connection] = rank() + " is alive, but its training does not stop";
    } else if (peer.stage == Stage::Placed && now >= since_ + limits_.entry) {
      lost[connection] = rank() + " has not met the others within " + seconds_text(limits_.entry);
    } else if (
        done_since_ && is_member(peer) && peer.stage != Stage::Done &&
        now >= *done_since_ + limits_.wait) {
      lost[connection] = rank() + " trains on, while others are done";
    }
  }
  for (const auto& [connection, why] : lost) {
    if (peers_.at(connection) == nullptr || phase_ == Phase::Over) continue;
    orders_.push_back(Say{why});
    drop_member(now, connection, why);
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
  if (!peers_.empty()) consider(now_ + kLookEvery);
  for (const auto& [connection, peer] : peers_) {
    consider(peer.heard + limits_.lost_after);
    if (peer.away_since) consider(*peer.away_since + limits_.back);
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

}  // namespace ddp::launch
