#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/parameter_layout.h>
#include <torch/nn/module.h>

namespace ddp {

/// By the parameters' TensorImpls.
using LayoutsByParameter = std::unordered_map<const void*, ParameterLayout>;

void add_layouts_of(const torch::nn::Module& module, LayoutsByParameter& layouts);

struct ModuleTensor {
  /// In the whole model, as layouts_of() has them: without wrappers in between. Several where
  /// modules share it; the first one names it in files.
  std::vector<std::string> names;
  std::vector<size_t> places;  // of the names, in the module's order
  at::Tensor tensor;
  at::Tensor value;        // what a save writes, of the same sizes
  ParameterLayout layout;  // where its elements are in the whole; its name is the first
};

/// A module's parameters and buffers, in the order of its named_state(); each once.
std::vector<ModuleTensor> tensors_of_module(const torch::nn::Module& module);

}  // namespace ddp
