#pragma once

#include <string>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include "prepared_load.h"

namespace ddp {

/// A module's parameters and buffers by name, as Python's `state_dict()`: those of a module before
/// those of its children, a shared one under each of its names. Of a DistributedDataParallel, the
/// wrapped module's.
c10::IValue module_dict(const torch::nn::Module& module);

/// Compares a `state_dict()` with a module; "module." before every name, as Python's wrapper saves
/// it, is left out.
///
/// \param strict  else missing and additional names are only noticed, and dtypes converted.
/// \param subject  that the texts of errors begin with.
/// \throws c10::ValueError  names, shapes or dtypes that do not fit.
PreparedLoad prepare_module(
    torch::nn::Module& module, const c10::IValue& saved, bool strict, const std::string& subject);

}  // namespace ddp
