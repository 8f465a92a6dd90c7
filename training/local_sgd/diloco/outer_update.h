#pragma once

#include <ATen/core/Tensor.h>

namespace ddp {

/// SGD, as torch::optim::SGD does it; `difference` is the gradient.
struct OuterUpdate {
  double lr = 0;
  double momentum = 0;
  bool nesterov = false;

  /// Changes `outer` and `buffer`, which is zeros at first.
  void step(at::Tensor outer, at::Tensor buffer, const at::Tensor& difference) const {
    buffer.mul_(momentum).add_(difference);
    outer.sub_(nesterov ? difference.add(buffer, momentum) : buffer, lr);
  }
};

}  // namespace ddp
