#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

/// The gradients of earlier steps, which are sums over ranks already, kept out of a step whose
/// reductions would sum them once more.
class EarlierGradients {
 public:
  /// Takes the gradients from the parameters. Copies them.
  explicit EarlierGradients(std::vector<at::Tensor> parameters);

  /// Adds them to the step's.
  void add() const;

 private:
  std::vector<at::Tensor> parameters_, gradients_;
};

}  // namespace ddp
