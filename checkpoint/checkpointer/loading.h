#pragma once

#include <cstdint>
#include <optional>

#include "checkpointer/checkpointed_run.h"
#include "checkpointer/saving.h"

namespace ddp {

// The loads of a Checkpointer. `saving` then continues from the loaded step.

/// Checkpointer::load_latest().
std::optional<int64_t> load_latest(CheckpointedRun& run, Saving& saving);

/// Checkpointer::load().
void load_step(CheckpointedRun& run, Saving& saving, int64_t step);

}  // namespace ddp
