// Files of named tensors, written one after the other.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include "tensors/safetensors_header.h"
#include "tensors/tensor_file.h"

namespace ddp {

/// Tensors that are written by name, and read when it is their turn: so one at a time needs memory.
struct TensorSource {
  std::vector<NamedKind> tensors;
  /// Returns the elements of tensors[i] on the host, row by row.
  std::function<at::Tensor(size_t i)> read;
  /// A number for each: equal ones are one tensor, which torch.save's format writes once.
  std::vector<size_t> same_as;
};

/// \param dict  outlives the source.
/// \throws c10::ValueError  a tensor without a dense storage; `path` is for its text.
TensorSource source_of(
    const torch::OrderedDict<std::string, at::Tensor>& dict, const std::string& path);

/// Writes a file of safetensors, that appears whole or not at all.
void write_safetensors(
    const TensorSource& source, const Metadata& metadata, const std::string& path);

/// Writes a file of torch.save, a dictionary of tensors, in the same way.
void write_torch_tensors(const TensorSource& source, const std::string& path);

}  // namespace ddp
