#pragma once

#include <memory>

#include <ddp/process_group.h>

#include "engine.h"

namespace ddp_bench {

// Training loops without a reducer. None of them overlaps anything.

/// Sends no gradients, and waits for the other ranks where they would be sent: the compute that
/// the other modes are measured against.
std::unique_ptr<Engine> make_none(Task task, const ddp::ProcessGroup& group);

/// Averages one gradient after the other.
std::unique_ptr<Engine> make_naive(Task task, const ddp::ProcessGroup& group);

/// Copies all gradients together, averages that, and copies them back.
std::unique_ptr<Engine> make_flat(Task task, const ddp::ProcessGroup& group);

}  // namespace ddp_bench
