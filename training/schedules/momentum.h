#pragma once

#include <cstddef>

#include <torch/optim/optimizer.h>

namespace ddp {

/// Sets the momentum of a parameter group, or its beta1.
///
/// \param schedule  its class, for error texts.
/// \throws c10::ValueError  the optimizer has neither.
void cycle_momentum_to(
    double momentum, torch::optim::Optimizer& optimizer, size_t group, const char* schedule);

}  // namespace ddp
