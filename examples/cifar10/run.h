#pragma once

#include "../common/progress.h"
#include "options.h"

namespace cifar10 {

/// Trains and evaluates on the default group. Collective.
///
/// \throws c10::Error, examples::FailedElsewhere
void run(const Options& options, examples::Progress& progress);

}  // namespace cifar10
