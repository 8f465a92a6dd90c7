#pragma once

#include <cstdint>
#include <vector>

#include <ddp/internal/membership/generations.h>
#include <ddp/process_group.h>

#include "elastic/part.h"

namespace ddp::elastic {

/// Where a run is, beside its parts.
struct Progress {
  int64_t steps = 0;          // finished
  int64_t turns = 0;          // that are over
  int64_t turns_of_step = 0;  // of them since the last step
};

/// Gives all ranks of a generation the state of its sources: the small parts to all, the bulk to
/// those that need it, in stripes, one from each source.
///
/// A received state lies in memory of its own until it is whole, and a rank's parts then change at
/// once: where a source is lost meanwhile, the rank still has what it had.
///
/// \param needs_state  whether this rank lacks the sources' step.
/// \throws c10::Error  on every rank: the parts of the ranks differ. RankLost.
///
/// Collective: yes. Blocks: host. Memory: on a rank that needs it the state once more; on all 16
/// MiB for each source or receiver.
void exchange_state(
    const ProcessGroup& group, const GenerationForm& form, bool needs_state,
    std::vector<Part>& parts, Progress& progress);

/// Compares a hash of all parts.
///
/// \throws c10::Error  on every rank, with the first part that differs.
///
/// Collective: yes. Cost: reads the state, a message of 8 bytes a part.
void verify_equal(const ProcessGroup& group, std::vector<Part>& parts);

}  // namespace ddp::elastic
