#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>

#include <ddp/internal/membership/lines.h>

namespace ddp::launch {

/// A process that the coordinator of an elastic job knows.
struct Peer {
  using Time = std::chrono::milliseconds;
  using Stage = membership::Stage;

  membership::Place place;
  int pid = 0;
  std::string host;
  int connection = 0;
  Time heard{0};
  std::optional<Time> away_since;  // its connection ended
  Stage stage = Stage::Preparing;  // changes by Peers::set_stage()
  bool leaves = false;
  bool announced = false;                        // Change was sent to the members for it
  bool was_training = false;                     // when it sent `back`
  Stage back_as = Stage::Training;               // Paused or Done, by its lines after `back`
  Time asked{0};                                 // when it was asked to report
  membership::Report report;                     // its last
  std::set<membership::ProcessId> accused_by{};  // members whose group failed because of it
};

inline bool is_member(const Peer& peer) { return peer.stage >= membership::Stage::Asked; }

/// The processes by their connections, with what an event asks of all of them at hand: a change of
/// a job of n members is some 5 n events, so none of them may walk over all.
class Peers {
 public:
  using Map = std::map<int, Peer>;

  /// A walk over all.
  Map::iterator begin();
  Map::iterator end() { return peers_.end(); }
  Map::const_iterator begin() const;
  Map::const_iterator end() const { return peers_.end(); }
  /// How many peers all walks together could have passed: for tests of how they grow.
  int64_t visits() const { return visits_; }

  bool empty() const { return peers_.empty(); }
  /// Null: none.
  Peer* at(int connection);
  Peer* find(membership::ProcessId id);
  Peer* holder_of(int slot);
  bool has_slot(int slot) const { return by_slot_.count(slot) > 0; }

  /// \param peer  whose connection, id and slot are no other's.
  void add(Peer peer);
  void erase(int connection);
  Peer& move(Peer& peer, int to);

  void set_stage(Peer& peer, membership::Stage stage);
  int count(membership::Stage stage) const { return counts_[static_cast<size_t>(stage)]; }
  /// Peers that are members.
  int members() const;

 private:
  Map peers_;  // by connection
  std::unordered_map<membership::ProcessId, int> by_id_;
  std::unordered_map<int, int> by_slot_;
  std::array<int, static_cast<size_t>(membership::Stage::Over) + 1> counts_{};
  mutable int64_t visits_ = 0;
};

}  // namespace ddp::launch
