#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Generator.h>
#include <ATen/core/ivalue.h>

#include "prepared_load.h"

namespace ddp {

/// The state of a generator, and back.
at::Tensor generator_state(at::Generator generator);
void set_generator_state(at::Generator generator, const at::Tensor& state);

/// The states of this process's default generators: the CPU's, and those of the GPUs that it uses.
c10::IValue random_state();

/// Checks such a state. GPUs that this process does not have are left out.
PreparedLoad prepare_random_state(const c10::IValue& saved, const std::string& subject);

/// Seeds for a rank that the saved run did not have: from rank 0's state, this rank and the step,
/// so that all ranks draw other numbers, the same in each run.
PreparedLoad prepare_new_random_state(
    const c10::IValue& saved_of_first, int rank, int64_t step, const std::string& subject);

}  // namespace ddp
