#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/parameter_layout.h>

namespace ddp {

/// Notes, as long as the parameters exist, that their data are a rank's shard.
void note_cut(const std::vector<ParameterLayout>& parameters);
/// Whether a unit has cut the parameter; also one that is gone.
bool is_cut(const at::Tensor& parameter);

}  // namespace ddp
