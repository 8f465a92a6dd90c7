#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/ivalue.h>

#include <ddp/internal/prepared_load.h>

namespace ddp {

/// Returns the states of this process's default generators, of the CPU and of the GPUs in use.
c10::IValue random_state();

/// Checks such a state. Leaves out GPUs that this process does not have.
PreparedLoad prepare_random_state(const c10::IValue& saved, const std::string& subject);

/// Prepares seeds for a rank that the saved run did not have, from rank 0's state, this rank and
/// the step: all ranks draw different numbers, the same in each run.
PreparedLoad prepare_new_random_state(
    const c10::IValue& saved_of_first, int rank, int64_t step, const std::string& subject);

}  // namespace ddp
