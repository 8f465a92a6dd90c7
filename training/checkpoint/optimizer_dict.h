#pragma once

#include <optional>
#include <string>

#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include "prepared_load.h"

namespace ddp {

/// The name of LibTorch's Adam, AdamW, SGD, RMSprop or Adagrad; nothing for another class.
std::optional<std::string> known_optimizer(const torch::optim::Optimizer& optimizer);

/// The state and the options of a known optimizer, as Python's `optimizer.state_dict()` of that
/// name has them.
c10::IValue optimizer_dict(torch::optim::Optimizer& optimizer);

/// Compares such a dictionary, ours or Python's, with a known optimizer.
///
/// \throws c10::ValueError  one that does not fit: other groups, another optimizer's, a state of
///         another shape, or Python's `maximize`, which LibTorch lacks.
PreparedLoad prepare_optimizer(
    torch::optim::Optimizer& optimizer, const c10::IValue& saved, const std::string& subject);

}  // namespace ddp
