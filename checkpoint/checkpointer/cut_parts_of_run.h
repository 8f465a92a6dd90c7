#pragma once

#include <string>

#include "checkpointer/checkpointed_run.h"

namespace ddp {

/// Makes sharded parts of the models that have parameters which are cut over the run's ranks, on
/// this rank or another one, and of their optimizers. Call it before parts are saved or loaded.
///
/// \return  why it cannot: an optimizer of such parameters whose state has no names, or whose model
///         is added as a part of each rank.
///
/// Collective: yes.
std::string divide_cut_parts(CheckpointedRun& run, const std::string& doing);

}  // namespace ddp
