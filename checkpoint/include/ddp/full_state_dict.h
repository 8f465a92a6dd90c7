#pragma once

#include <string>

#include <ATen/core/Tensor.h>
#include <ddp/export.h>
#include <ddp/process_group.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/ordered_dict.h>

namespace ddp {

/// \file
/// The whole state of a model whose parameters are cut over ranks, or are not. Names are those of
/// the whole model (layouts_of()), without wrappers' prefixes.

/// Gathers a model's parameters and buffers on one rank.
///
/// Of replicas the first rank's values count. A parameter or buffer that is not cut
/// (ParameterLayout::sharded_over is empty) must be on every rank, under the same name; ranks may
/// lack one that is, as the stages of a pipeline do.
///
/// \param module  a module, also a wrapped one.
/// \param to  the rank, of the group, that gets the dictionary.
/// \param group  all ranks that have parts of the model.
/// \return on rank `to` tensors in host memory that are the caller's own, in the order of the
/// module
///         there; a shared parameter is under each of its names, one tensor. Empty on other ranks.
/// \throws c10::Error  on every rank: the ranks have other names, shapes, dtypes or another `to`;
/// an
///         element that no rank has; a rank that does not call it, as failures of collectives.
///
/// Collective: yes. Blocks: host. Cost: the model in host memory on `to`, and on the others
/// copies of their parts of one parameter, or of two where a message is still on its way. Each
/// element is sent once.
DDP_API torch::OrderedDict<std::string, at::Tensor> full_state_dict(
    const torch::nn::Module& module, int to = 0, const GroupArg& group = {});

/// Loads a whole state from a file: each rank reads the elements that it has.
///
/// Names must be the model's, and sizes; dtypes are converted. Of the names of a shared parameter
/// the file needs one; if it has several, the first in the module's order counts.
///
/// \param module  whose parameters and buffers are written in place; optimizers stay valid.
/// \param file  the same on every rank: of safetensors where it ends with ".safetensors", an index
/// of
///        such files with ".json", else Python's torch.save(model.state_dict(), file), or
///        save_state_dict()'s.
/// \throws c10::Error  on every rank, with the same text, before anything changes: names that the
///         file or the model lacks, other sizes, a file that cannot be read or differs between
///         ranks.
///
/// Collective: yes. Blocks: host. Cost: host memory of this rank's elements in the file's dtype.
DDP_API void load_full_state_dict(
    torch::nn::Module& module, const std::string& file, const GroupArg& group = {});

/// Loads a whole state that rank 0 has: it sends one tensor at a time to all ranks.
///
/// \param dict  rank 0's counts, as full_state_dict() returns it; other ranks' is not looked at.
/// \throws c10::Error  as above. A rank that is lost while tensors are sent leaves the model with
///         some of them.
///
/// Collective: yes. Blocks: host. Cost: the model is sent once to every rank; memory of one
/// parameter.
DDP_API void load_full_state_dict(
    torch::nn::Module& module, const torch::OrderedDict<std::string, at::Tensor>& dict,
    const GroupArg& group = {});

/// The same of a holder: full_state_dict(model).
template <typename Contained>
torch::OrderedDict<std::string, at::Tensor> full_state_dict(
    const torch::nn::ModuleHolder<Contained>& module, int to = 0, const GroupArg& group = {}) {
  return full_state_dict(static_cast<const torch::nn::Module&>(*module), to, group);
}
/// The same of a holder: load_full_state_dict(model, "model.safetensors").
template <typename Contained, typename FileOrDict>
void load_full_state_dict(
    const torch::nn::ModuleHolder<Contained>& module, const FileOrDict& file_or_dict,
    const GroupArg& group = {}) {
  load_full_state_dict(static_cast<torch::nn::Module&>(*module.ptr()), file_or_dict, group);
}

}  // namespace ddp
