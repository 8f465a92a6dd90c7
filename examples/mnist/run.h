#pragma once

#include "../common/progress.h"
#include "options.h"

namespace mnist {

/// Trains, evaluates, checks that the replicas are equal, and saves: the whole program after its
/// command line. `progress` gets rank 0's lines; the last is "test accuracy: 98.61% (355/360)".
///
/// \throws c10::Error  data, options or devices cannot be used, or the ranks end with different
///         parameters.
///
/// Collective: yes, on the default group.
void run(const Options& options, examples::Progress& progress);

}  // namespace mnist
