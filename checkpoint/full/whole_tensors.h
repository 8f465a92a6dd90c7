// Describes every tensor of a sharded model; each rank holds the whole description.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <ddp/internal/module_tensors.h>
#include "shards/layout.h"
#include "tensors/tensor_file.h"

namespace ddp {

struct OwnPart {
  std::string name;
  TensorBox box;
  at::Tensor view;  // of the module's memory, or of what a save writes
};

struct OwnParts {
  std::vector<OwnPart> parts;
  std::vector<ShardLayout> layouts;  // the same boxes, and an empty one of each tensor without
  std::vector<std::string> whole;    // names of tensors that are not cut
  std::vector<std::pair<std::string, std::string>> names;  // and first names, in the module's order
};

/// Which values the views of OwnParts are of.
enum class Values {
  ToSave,
  ToLoad,  // the module's own tensors
};

/// \throws c10::ValueError  a layout with boxes outside its parameter.
OwnParts own_parts_of(const torch::nn::Module& module, Values values);

/// A text for the other ranks.
std::string to_text(const OwnParts& own);

struct WholeTensors {
  std::vector<NamedKind> tensors;  // in rank 0's order; then the tensors that rank 0 lacks
  /// Every name, with its tensor's number in `tensors`; in the same order.
  std::vector<std::pair<std::string, size_t>> names;
  std::vector<std::vector<ShardLayout>> ranks;  // by rank; replicas are numbered
};

/// Puts together what the ranks have. A pure function: all ranks make the same.
///
/// \param by_rank  the ranks' to_text().
/// \throws c10::ValueError  ranks with other names, shapes or dtypes; `function` is the subject.
WholeTensors whole_tensors(const std::string& function, const std::vector<std::string>& by_rank);

/// Returns the first problem with its rank; "" where all are "".
std::string first_problem(const std::vector<std::string>& by_rank);

}  // namespace ddp
