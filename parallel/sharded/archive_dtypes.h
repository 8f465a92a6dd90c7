#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

namespace ddp {

/// Has a module's parameters and buffers in the dtypes of an archive, for Module::load(): that
/// gives a tensor the archive's memory and leaves it its dtype, so that the bytes of other dtypes
/// would be taken for values of this one.
class ArchiveDtypes {
 public:
  /// Tensors of other dtypes have no elements until they are loaded.
  ArchiveDtypes(torch::nn::Module& module, torch::serialize::InputArchive& archive) {
    take(module, archive);
  }
  /// The tensors are as they were, unless finish() was called.
  ~ArchiveDtypes();
  ArchiveDtypes(const ArchiveDtypes&) = delete;
  ArchiveDtypes& operator=(const ArchiveDtypes&) = delete;

  /// Converts the loaded tensors to their own dtypes.
  void finish();

 private:
  void take(torch::nn::Module& module, torch::serialize::InputArchive& archive);

  std::vector<std::pair<at::Tensor, at::Tensor>> before_;  // those of other dtypes
};

}  // namespace ddp
