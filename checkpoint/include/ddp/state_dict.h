#pragma once

#include <ddp/export.h>

#include <string>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

namespace ddp {

/// \file
/// Files of weights and of optimizers, as Python's torch.save(model.state_dict(), file) writes them
/// and torch.load(file, weights_only=True) reads them. For all of them:
///
/// - No call communicates. Rank 0 saves for all, and every rank loads.
/// - Of layers that are cut over ranks each rank has a part, which alone is saved and loaded here,
///   as by torch::save(). A Checkpointer saves the whole, and full_state_dict() gathers it.
/// - Saving writes only the elements of each tensor, also of a view, and a shared parameter once.
///   The file appears whole or not at all: it is written beside `file`, and renamed once it is on
///   the disk.
/// - Loading copies into the existing parameters, on whatever device; their optimizers stay valid.
///   Nothing changes where it throws.
/// - Python does not read files that hold uint16, uint32, uint64, float8 or float4 tensors.

/// Saves parameters and buffers under the names that Python's `state_dict()` gives them. For a
/// DistributedDataParallel, saves those of the wrapped module.
///
/// \throws c10::ValueError  a tensor without a dense storage. c10::Error  the file cannot be
///         written.
DDP_API void save_state_dict(const torch::nn::Module& module, const std::string& file);

/// Saves tensors by name, as full_state_dict() returns them. A tensor under several names is
/// written once.
///
/// \throws c10::ValueError  a tensor without a dense storage. c10::Error  the file cannot be
///         written.
///
/// Cost: host memory of one tensor where that is not on the host row by row.
DDP_API void save_state_dict(
    const torch::OrderedDict<std::string, at::Tensor>& dict, const std::string& file);

/// Loads what save_state_dict or Python saved. Leaves out a "module." before every name, as
/// Python's DistributedDataParallel saves it.
///
/// \param strict  whether names that only the file or only the module has, and other dtypes, are
///        errors. If not, a warning lists the names, and the values are converted.
/// \throws c10::Error  the file cannot be read, or is no such file. c10::ValueError  names, shapes
///         or dtypes that do not fit.
DDP_API void load_state_dict(
    torch::nn::Module& module, const std::string& file, bool strict = true);

/// Saves an Adam, AdamW, SGD, RMSprop or Adagrad of LibTorch as Python's `optimizer.state_dict()`:
/// the state by the index of each parameter over all groups, and the groups' options.
///
/// \throws c10::ValueError  another class. c10::Error  the file cannot be written.
DDP_API void save_state_dict(torch::optim::Optimizer& optimizer, const std::string& file);

/// Loads what save_state_dict saved, or Python's optimizer of the same name, made with the
/// parameters in the same order. The saved options, such as the learning rate, replace the
/// optimizer's.
///
/// \throws c10::Error  the file cannot be read, or is no such file. c10::ValueError  another class,
///         or a state that does not fit: other groups, other shapes, Python's `maximize`.
DDP_API void load_state_dict(torch::optim::Optimizer& optimizer, const std::string& file);

}  // namespace ddp
