#pragma once

#include <string>

#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <ddp/internal/prepared_load.h>

namespace ddp {

/// Whether it is LibTorch's Adam, AdamW, SGD, RMSprop or Adagrad, and of no other class.
bool is_known_optimizer(const torch::optim::Optimizer& optimizer);

/// Returns the state and the options of a known optimizer, in the layout of the
/// `optimizer.state_dict()` of Python's optimizer of that name.
c10::IValue optimizer_dict(torch::optim::Optimizer& optimizer);

/// Compares such a dictionary, ours or Python's, with a known optimizer.
///
/// \throws c10::ValueError  it does not fit: other groups, another kind of optimizer, a state of
///         another shape, or Python's `maximize`, which LibTorch lacks.
PreparedLoad prepare_optimizer(
    torch::optim::Optimizer& optimizer, const c10::IValue& saved, const std::string& subject);

}  // namespace ddp
