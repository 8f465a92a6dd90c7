#pragma once

#include <string>
#include <vector>

#include "shards/shard_file.h"
#include "tensors/tensor_file.h"

namespace ddp {

/// A file of torch.save with a state_dict(): names with their tensors.
class TorchTensors : public TensorFile {
 public:
  /// \throws c10::Error  with the path: it is no such file, or holds something else.
  explicit TorchTensors(const std::string& path);

  const std::vector<NamedKind>& tensors() const override { return tensors_; }
  at::Tensor read(size_t i, const Box& box) override;

 private:
  ShardFile file_;
  std::vector<NamedKind> tensors_;
};

}  // namespace ddp
