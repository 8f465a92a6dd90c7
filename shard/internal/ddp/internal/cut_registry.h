#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/parameter_layout.h>

namespace ddp {

/// The cause of a rank's having a part of a parameter: a layer such as ColumnParallelLinear, or a
/// fully sharded unit, which may cut a layer's part again.
enum class CutBy { Nothing, Layer, Unit };

/// Notes, as long as the parameters exist, that their data are a rank's part. Of a layer's only
/// those that it cuts over several ranks.
void note_cut(const std::vector<ParameterLayout>& parameters, CutBy by);
/// Also by a unit that is gone.
CutBy cut_of(const at::Tensor& parameter);

}  // namespace ddp
