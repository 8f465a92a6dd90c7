#pragma once

#include <functional>

#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

namespace ddp {

/// What a tensor of a module is worth.
using ValueOf = std::function<at::Tensor(const at::Tensor&)>;

/// Gives a copy of a module the values of the module's parameters and buffers.
///
/// \throws c10::ValueError  `copy` has other names or shapes.
void copy_values(const torch::nn::Module& module, torch::nn::Module& copy, const ValueOf& value_of);

/// As torch::nn::Module::save(), with other values.
void write_module(
    const torch::nn::Module& module, torch::serialize::OutputArchive& archive,
    const ValueOf& value_of);

}  // namespace ddp
