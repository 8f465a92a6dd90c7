#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <ddp/checkpointer.h>

#include "progress.h"

namespace examples {

/// Begins a run that keeps checkpoints; with `resume`, from the newest checkpoint.
///
/// \param checkpointer  of a program's --checkpoint; nothing where the run keeps none.
/// \param folder  of the checkpoints, which --checkpoint named.
/// \param unit    the program's word for a step.
/// \return the step after which the run continues; 0 at the beginning.
/// \throws c10::ValueError  a new run finds the checkpoints of another one. c10::Error  they are
///         not this program's.
///
/// Collective: yes, on the default group.
int64_t begin_run(
    std::optional<ddp::Checkpointer>& checkpointer, const std::string& folder, bool resume,
    Progress& progress, const char* unit = "step");

}  // namespace examples
