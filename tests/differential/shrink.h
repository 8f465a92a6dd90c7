// Makes the program of a finding smaller while it stays a finding of the same kind.
#pragma once

#include <functional>

#include "differential/worker.h"

namespace ddp::differential {

/// Sets choices to their simplest values, one at a time, until none can be left out.
Program shrink(Program program, const Outcome& found, const std::function<Outcome(const Program&)>& run);

}  // namespace ddp::differential
