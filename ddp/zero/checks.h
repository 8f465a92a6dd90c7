#pragma once

#include <vector>

#include <ddp/zero.h>

#include "wrapper/state.h"

namespace ddp {

/// Returns the options.
///
/// \throws c10::ValueError  options that do not fit each other, the optimizer or the model.
const ZeroOptions& checked(
    const ZeroOptions& options, const detail::ZeroKind& kind,
    const DistributedDataParallelBase::State& model);

/// \throws c10::ValueError  parameters that are not the model's, whose gradients are sparse, or
/// that
///         are cut over ranks though the optimizer needs whole ones.
void check_parameters(
    const std::vector<torch::optim::OptimizerParamGroup>& groups, const detail::ZeroKind& kind,
    const DistributedDataParallelBase::State& model);

}  // namespace ddp
