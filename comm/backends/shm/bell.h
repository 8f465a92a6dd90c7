#pragma once

#include <chrono>

#include <c10/util/FunctionRef.h>

#include "board.h"

namespace ddp::backends::shm {

/// Wakes whoever sleeps in sleep_until: call it after each write that they may wait for.
void ring(Board& board);

/// Spins a little, then sleeps until `condition` may hold: it returns as soon as it does, or after
/// `at_most`.
///
/// \return whether it holds.
bool sleep_until(
    Board& board, c10::function_ref<bool()> condition, std::chrono::milliseconds at_most);

}  // namespace ddp::backends::shm
