// The values of a model that the ranks of --tp have in parts, in one model that has them all: that
// is what a file of weights holds.
#pragma once

#include "model.h"

namespace transformer {

/// Copies a whole model's values to this rank's parts.
void cut_weights(const LanguageModel& whole, const LanguageModel& net);

/// \return a whole model with the values of all ranks of --tp. Collective: on these.
LanguageModel join_weights(const LanguageModel& net);

}  // namespace transformer
