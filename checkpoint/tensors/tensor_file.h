#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shards/box.h"
#include "shards/layout.h"

namespace ddp {

struct NamedKind {
  std::string name;
  TensorKind kind;
};

TensorBox whole_box(const std::vector<int64_t>& sizes);

/// A file with tensors by name, whose elements are read when they are asked for.
class TensorFile {
 public:
  TensorFile() = default;
  virtual ~TensorFile() = default;
  C10_DISABLE_COPY_AND_ASSIGN(TensorFile);

  /// In the file's order; each name once.
  virtual const std::vector<NamedKind>& tensors() const = 0;

  /// Reads the elements `box` of a tensor.
  ///
  /// \param i  its number in tensors().
  /// \return a tensor of the shape of the box, in host memory.
  /// \throws c10::Error  with the path.
  virtual at::Tensor read(size_t i, const TensorBox& box) = 0;

  at::Tensor read(size_t i) { return read(i, whole_box(tensors()[i].kind.sizes)); }
};

/// Opens a file: of safetensors where the name ends with ".safetensors", an index of such files
/// where it ends with ".json", and else a file of torch.save.
///
/// \throws c10::Error  with the path: it cannot be read, or is no such file.
std::unique_ptr<TensorFile> open_tensor_file(const std::string& path);

bool is_safetensors(const std::string& path);
bool is_safetensors_index(const std::string& path);

}  // namespace ddp
