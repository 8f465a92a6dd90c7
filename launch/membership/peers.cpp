#include "launch/membership/peers.h"

#include <numeric>
#include <utility>

namespace ddp::launch {

using membership::Stage;

Peers::Map::iterator Peers::begin() {
  visits_ += static_cast<int64_t>(peers_.size());
  return peers_.begin();
}

Peers::Map::const_iterator Peers::begin() const {
  visits_ += static_cast<int64_t>(peers_.size());
  return peers_.begin();
}

Peer* Peers::at(int connection) {
  const auto found = peers_.find(connection);
  return found == peers_.end() ? nullptr : &found->second;
}

Peer* Peers::find(membership::ProcessId id) {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : at(found->second);
}

Peer* Peers::holder_of(int slot) {
  const auto found = by_slot_.find(slot);
  return found == by_slot_.end() ? nullptr : at(found->second);
}

void Peers::add(Peer peer) {
  by_id_[peer.place.id] = peer.connection;
  by_slot_[peer.place.slot] = peer.connection;
  ++counts_[static_cast<size_t>(peer.stage)];
  const int connection = peer.connection;
  peers_.emplace(connection, std::move(peer));
}

void Peers::erase(int connection) {
  const auto found = peers_.find(connection);
  const Peer& peer = found->second;
  by_id_.erase(peer.place.id);
  by_slot_.erase(peer.place.slot);
  --counts_[static_cast<size_t>(peer.stage)];
  peers_.erase(found);
}

Peer& Peers::move(Peer& peer, int to) {
  auto entry = peers_.extract(peer.connection);
  entry.key() = to;
  Peer& moved = entry.mapped();
  moved.connection = by_id_[moved.place.id] = by_slot_[moved.place.slot] = to;
  peers_.insert(std::move(entry));
  return moved;
}

void Peers::set_stage(Peer& peer, Stage stage) {
  --counts_[static_cast<size_t>(std::exchange(peer.stage, stage))];
  ++counts_[static_cast<size_t>(stage)];
}

int Peers::members() const {
  const auto* first = counts_.data() + static_cast<size_t>(Stage::Asked);
  return std::accumulate(first, counts_.data() + counts_.size(), 0);
}

}  // namespace ddp::launch
