#pragma once

#include <functional>
#include <unordered_map>

#include <ATen/core/Tensor.h>

#include "shards/layout.h"

namespace ddp {

/// Tensors without memory, in the places of those that are read while a file is written: so one at
/// a time needs memory.
class LazyTensors {
 public:
  using Read = std::function<at::Tensor()>;

  /// \param read  returns the elements, on the host, row by row; called once.
  /// \return a tensor to put into a dictionary, under several keys if they share it.
  at::Tensor add(const TensorKind& kind, Read read);

  /// Returns the elements of a tensor of add(); an undefined tensor for any other.
  at::Tensor read(const at::Tensor& placeholder) const;

 private:
  std::unordered_map<const void*, Read> reads_;  // by StorageImpl
};

}  // namespace ddp
