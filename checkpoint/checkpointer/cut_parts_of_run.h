#pragma once

#include "checkpointer/checkpointed_run.h"

namespace ddp {

/// Makes sharded parts of the models that have parameters which are cut over the run's ranks, and
/// of their optimizers. Call it before parts are saved or loaded.
///
/// \throws c10::ValueError  an optimizer of such parameters whose state has no names, or whose
///         model is added as a part of each rank.
void divide_cut_parts(CheckpointedRun& run);

}  // namespace ddp
