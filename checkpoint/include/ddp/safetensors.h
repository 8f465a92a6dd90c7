#pragma once

#include <map>
#include <string>

#include <ATen/core/Tensor.h>
#include <ddp/export.h>
#include <torch/ordered_dict.h>

namespace ddp {

/// \file
/// Files of safetensors, Hugging Face's format of weights. No call communicates.

/// Saves tensors by name.
///
/// The file appears whole or not at all: it is written beside `file`, and renamed once it is on the
/// disk. Larger dtypes come first in it, so that elements are aligned. A tensor under two names is
/// written twice: the format has no shared ones.
///
/// \param dict  dense tensors on any devices.
/// \param metadata  texts; the transformers package wants {{"format", "pt"}} to load the file.
/// \throws c10::ValueError  a dtype that the format lacks (complex double, say), a name that is not
///         UTF-8, a tensor that is not dense. c10::Error  the file cannot be written.
///
/// Cost: host memory of one tensor where that is not on the host row by row.
DDP_API void save_safetensors(
    const torch::OrderedDict<std::string, at::Tensor>& dict, const std::string& file,
    const std::map<std::string, std::string>& metadata = {});

/// Loads all tensors of a file, or of the files that an index names.
///
/// \param file_or_index  an index where the name ends with ".json", such as
///        "model.safetensors.index.json", with the files beside it.
/// \return tensors in host memory, in the order of the file's header or of the index.
/// \throws c10::Error  the file cannot be read, or breaks a rule of the format: the text names
/// file,
///         tensor, rule and value.
///
/// Cost: one read of the files. They must not become shorter meanwhile.
DDP_API torch::OrderedDict<std::string, at::Tensor> load_safetensors(
    const std::string& file_or_index);

/// Returns the metadata of one file of safetensors.
///
/// \throws c10::Error  as load_safetensors().
DDP_API std::map<std::string, std::string> safetensors_metadata(const std::string& file);

}  // namespace ddp
