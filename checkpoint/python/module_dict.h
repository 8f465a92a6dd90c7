#pragma once

#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include <ddp/internal/prepared_load.h>

namespace ddp {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// Returns the tensors of a saved `state_dict()`.
///
/// \throws c10::ValueError  it is something else; `subject` begins the text.
std::vector<NamedTensor> tensors_in(const c10::IValue& saved, const std::string& subject);

/// The module whose state it is: of a DistributedDataParallel the wrapped one, else itself.
const torch::nn::Module& state_root(const torch::nn::Module& module);

/// A module's parameters and buffers: its own come before its children's, and a shared one is under
/// each of its names. Of the module's state_root().
std::vector<NamedTensor> named_state(const torch::nn::Module& module);

/// The values of a module's state that a save writes.
std::vector<at::Tensor> values_to_save(
    const torch::nn::Module& module, const std::vector<NamedTensor>& state);

/// Returns a module's named_state() as Python's `state_dict()`.
c10::IValue module_dict(const torch::nn::Module& module);

/// Compares a `state_dict()` with a module. Leaves out a "module." before every name, as Python's
/// wrapper saves it.
///
/// \param strict  false: missing and additional names only give a notice, and dtypes are converted.
/// \param subject  the texts of errors begin with it.
/// \throws c10::ValueError  names, shapes or dtypes do not fit.
PreparedLoad prepare_module(
    torch::nn::Module& module, const c10::IValue& saved, bool strict, const std::string& subject);

}  // namespace ddp
