#pragma once

#include <functional>

#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

namespace ddp {

/// The value to copy for a tensor of a module: during a pass in low precision, the original's.
using ValueOf = std::function<at::Tensor(const at::Tensor&)>;

/// Gives a copy of a module the values of the module's parameters and buffers.
///
/// \throws c10::ValueError  `copy` has other names or shapes.
void copy_values(const torch::nn::Module& module, torch::nn::Module& copy, const ValueOf& value_of);

/// Writes what torch::nn::Module::save() writes, with the values of `value_of`.
void write_module(
    const torch::nn::Module& module, torch::serialize::OutputArchive& archive,
    const ValueOf& value_of);

}  // namespace ddp
