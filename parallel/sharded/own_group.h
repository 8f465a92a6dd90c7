#pragma once

#include <cstdint>

#include <ddp/process_group.h>

namespace ddp {

/// Collectives of sharded models that have an order of their own.
enum class OwnOrder { Gathers, Reductions };

struct OwnGroup {
  ProcessGroup group;
  int64_t number = 0;  ///< of the requests for it, rising from 1, the same on all ranks
};

/// A group of the same ranks for these collectives alone: neither the other ones' order nor that of
/// the program's collectives can differ from theirs between ranks. All who ask for it while it is
/// used get the same.
///
/// \param group  null: returns null.
/// \param replicas  null, or the ranks at the same place of other groups, which get the same
/// number.
///
/// Collective: yes, over both. Blocks: host.
OwnGroup own_group_of(
    const ProcessGroup& group, OwnOrder order, const ProcessGroup& replicas = nullptr);

}  // namespace ddp
