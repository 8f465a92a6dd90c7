#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ddp/process_group.h>

#include "elastic/part.h"
#include "elastic/transfer.h"

namespace ddp::elastic {

/// Which rank keeps a copy of each rank's shards: the one with the same place on the next host; on
/// one host, the next rank.
///
/// \param hosts  names, by rank.
std::vector<int> keepers_of(const std::vector<std::string>& hosts);

/// Boundaries to which all ranks can go back, in a run with parts that are cut over them.
///
/// Each rank has a copy of its own state, and of another rank's shards: of a lost rank's part there
/// is nothing else. A snapshot is of use once all ranks have it; until then the one before stays.
class Snapshots {
 public:
  /// Takes one at this boundary.
  ///
  /// \throws RankLost.
  /// Collective: yes. Blocks: host. Memory: the replicated state, and two ranks' shards.
  void take(const ProcessGroup& group, std::vector<Part>& parts, const Progress& progress);
  /// The steps of the last snapshot.
  int64_t steps() const { return kept_.empty() ? 0 : kept_.back().progress.steps; }

  /// Looks for the newest one of which the ranks of another group have all shards.
  ///
  /// \return  whether there is one; the others are dropped.
  /// Collective: yes. Blocks: host.
  bool choose(const ProcessGroup& group);
  /// Takes this rank's state back to it, but for the shards. Does nothing on a rank that joins.
  void go_back(std::vector<Part>& parts, Progress& progress) const;
  /// Gives all ranks their elements of its shards, after the parts were cut over the group.
  ///
  /// Collective: yes. Blocks: host. Memory: one shard more.
  void redistribute_shards(const ProcessGroup& group, std::vector<Part>& parts) const;

 private:
  struct Snapshot {
    int64_t number = 0;  // the same on all ranks
    int ranks = 0;
    Progress progress = {};
    std::vector<c10::IValue> states = {};    // by part
    std::map<int, std::string> shards = {};  // by the rank whose they are: its own, and others'
  };
  /// Where a shard of the chosen one is.
  struct Place {
    int rank = -1;
    size_t bytes = 0;
  };

  static std::string described(const std::vector<Snapshot>& snapshots);

  std::vector<Snapshot> kept_;  // one, or two while the second is taken
  int64_t last_number_ = 0;
  int64_t chosen_ = 0;
  std::vector<Place> places_;  // by the rank whose shard it was
};

}  // namespace ddp::elastic
