#pragma once

#include <memory>

#include <ddp/process_group.h>

#include "engine.h"

namespace ddp_bench {

// Training loops without a reducer. None of them overlaps communication with computation.

/// Sends no gradients, but waits for the other ranks at that point: the compute time with which
/// other modes are compared.
std::unique_ptr<Engine> make_none(Task task, const ddp::ProcessGroup& group);

/// Averages the gradients one by one.
std::unique_ptr<Engine> make_naive(Task task, const ddp::ProcessGroup& group);

/// Copies all gradients together, averages that, and copies them back.
std::unique_ptr<Engine> make_flat(Task task, const ddp::ProcessGroup& group);

}  // namespace ddp_bench
