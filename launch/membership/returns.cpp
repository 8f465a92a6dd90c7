// Processes whose connections end and that come back, and stops of the coordinator itself.
#include <algorithm>

#include <ddp/internal/text.h>

#include "launch/membership/membership.h"

namespace ddp::launch {

using namespace membership;

namespace {

// A coordinator that looks at the time so much later than it wanted to was stopped; a busy host
// makes it late by less.
constexpr Membership::Time kHeldUp(500);

}  // namespace

/// Begins each event.
void Membership::pass_until(Time now) {
  const auto due = std::exchange(look_by_, std::nullopt);
  if (due && now >= *due + kHeldUp) postpone(now - *due);
  now_ = now;
}

/// Takes the time in which this process did not run out of all waits: the others may have been
/// stopped with it, as in a container that was paused.
void Membership::postpone(Time late) {
  for (auto& [connection, peer] : peers_) {
    peer.heard += late;
    peer.asked += late;
    if (peer.away_since) *peer.away_since += late;
  }
  since_ += late;
  for (auto* begin : {&waits_since_, &paused_since_, &done_since_}) {
    if (*begin) **begin += late;
  }
  for (auto& [process, until] : dying_) until += late;
}

/// A second hello of a process that is known. It does not know of a generation: either it comes
/// back, or says hello twice on its connection, and what the coordinator told it was lost; or this
/// is an old line of a connection that it has left.
void Membership::take_again(Time now, Peer& known, Connection from, const Hello& hello) {
  const bool may_not_know = known.connection == from || known.stage < Stage::Back ||
                            known.stage == Stage::Asked || known.stage == Stage::Placed;
  const bool is_same = known.pid == hello.pid && known.host == hello.host;
  if (!may_not_know || !is_same) return orders_.push_back(Close{from});
  const Peer& peer = move(now, known, from);
  greet(peer);
  repeat_to(peer);
}

/// \param to  its own connection, or one of no other process.
Peer& Membership::move(Time now, Peer& known, Connection to) {
  known.heard = now;
  if (known.connection == to) return known;
  if (!known.away_since) orders_.push_back(Close{known.connection});
  Peer& peer = peers_.move(known, to);
  peer.away_since.reset();
  return peer;
}

/// Closes a connection on which another process introduces itself. The one that had it may come
/// back by a connection of its own.
void Membership::refuse_second_process(Time now, Peer& first) {
  first.away_since = now;
  const auto text =
      str("connection of rank ", first.place.slot,
          ": expected lines of one process, got another one's. Connect each process by itself");
  refuse(first.connection, End{2, {text}});
}

/// Says again what the process may have missed. A process ignores what it knows already.
void Membership::repeat_to(const Peer& peer) {
  const auto say = [&](const CoordinatorMessage& message) {
    orders_.push_back(Send{peer.connection, message});
  };
  if (peer.stage == Stage::Asked) say(Gather{state_.number, {why_}});
  if (peer.stage == Stage::Placed) {
    say(form_);
    if (!store_.empty()) say(Store{state_.formed, store_});
  }
  if (!is_member(peer) || phase_ != Phase::Running) return;
  const bool change_is_due = std::any_of(
      peers_.begin(), peers_.end(), [](const auto& entry) { return entry.second.announced; });
  if (change_is_due) say(Change{});
}

/// Lets go of a process that is away where another one comes for its slot.
///
/// \return false when the job is over by that.
bool Membership::make_way(Time now, int slot) {
  const Peer* holder = peers_.holder_of(slot);
  if (holder == nullptr || !holder->away_since) return true;
  drop_member(now, holder->connection, closed_text(*holder));
  return phase_ != Phase::Over;
}

/// Whether a process that would take part in the next generation may be about to come back.
bool Membership::awaits_connection() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& entry) {
    return entry.second.away_since && entry.second.stage >= Stage::Ready;
  });
}

std::string Membership::closed_text(const Peer& peer) {
  return str("rank ", peer.place.slot, " closed its connection");
}

}  // namespace ddp::launch
