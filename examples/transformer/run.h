#pragma once

#include "options.h"

namespace transformer {

/// Makes the default group; trains, evaluates and samples on it. Collective.
///
/// \throws UsageError, c10::Error, examples::FailedElsewhere
void run(const Options& options);

}  // namespace transformer
