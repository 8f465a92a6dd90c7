// Makes the program of a finding smaller while it stays a finding of the same kind.
#pragma once

#include <functional>

#include "differential/worker.h"

namespace ddp::differential {

/// Sets choices to their simplest values, one at a time, until none can be left out.
Program shrink(
    Program program, const Outcome& found, const std::function<Outcome(const Program&)>& run);

/// Whether a program has all choices of a smaller one, so that it may have found the same.
bool contains(const Program& program, const Program& smaller);

}  // namespace ddp::differential
