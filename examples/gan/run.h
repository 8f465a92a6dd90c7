#pragma once

#include "../common/progress.h"
#include "options.h"

namespace gan {

/// Trains on the default group; rank 0 measures and draws samples. Collective.
///
/// \throws c10::Error, examples::FailedElsewhere
void run(const Options& options, examples::Progress& progress);

}  // namespace gan
