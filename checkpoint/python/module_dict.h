#pragma once

#include <string>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include <ddp/internal/prepared_load.h>

namespace ddp {

/// Returns a module's parameters and buffers by name, as Python's `state_dict()`: a module's own
/// come before its children's, and a shared one is under each of its names. For a
/// DistributedDataParallel, returns those of the wrapped module.
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
