#pragma once

#include <unordered_set>

#include <ATen/core/Tensor.h>

namespace ddp {

/// Finds repeated tensors: a shared tensor has several names.
class SeenTensors {
 public:
  /// Whether `t` is added for the first time.
  bool add(const at::Tensor& t) { return seen_.insert(t.unsafeGetTensorImpl()).second; }

 private:
  std::unordered_set<const void*> seen_;
};

}  // namespace ddp
