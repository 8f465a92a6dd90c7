#pragma once

#include <memory>
#include <string>
#include <unordered_map>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <caffe2/serialize/file_adapter.h>

#include "shards/layout.h"

namespace ddp {

/// A file of torch.save with a dictionary of tensors, of which ranges of elements are read.
class ShardFile {
 public:
  /// Reads the dictionary without the elements. \throws c10::Error  with the path; so does read().
  explicit ShardFile(std::string path);

  /// The file's value, whose tensors have no memory.
  const c10::IValue& contents() const { return dict_; }

  /// Reads the elements `part` of a tensor, which is itself the box `whole` of a larger one.
  ///
  /// \return a tensor of the shape of `part`.
  at::Tensor read(
      const std::string& key, at::ScalarType dtype, const TensorBox& whole, const TensorBox& part);

  bool is_open() const { return file_ != nullptr; }
  /// Gives the descriptor back. read() opens the file again, whose dictionary stays known.
  void close() { file_.reset(); }

 private:
  void read_bytes(const at::Tensor& recorded, int64_t first, int64_t count, void* to);
  at::Tensor read_strided(const at::Tensor& recorded, const TensorBox& part);

  const std::string path_;
  std::shared_ptr<caffe2::serialize::FileAdapter> file_;
  c10::IValue dict_;                                          // tensors without memory
  std::unordered_map<const void*, size_t> begin_of_storage_;  // bytes from the front of the file
};

}  // namespace ddp
