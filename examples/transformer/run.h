#pragma once

#include "../common/progress.h"
#include "options.h"

namespace transformer {

/// Trains, evaluates and samples on the default group. Collective.
///
/// \throws UsageError, c10::Error, examples::FailedElsewhere
void run(const Options& options, examples::Progress& progress);

}  // namespace transformer
