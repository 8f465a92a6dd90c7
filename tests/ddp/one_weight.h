// A model of one weight, 1, whose gradient is its input.
#pragma once

#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "support/nets.h"

namespace ddp::testing {

/// The gradient of w * x is x, on this rank.
/// \return the average.
inline float step(DistributedDataParallel<torch::nn::Linear>& model, double x) {
  model->zero_grad();
  model->forward(torch::full({1, 1}, x)).sum().backward();
  return model->module()->weight.grad().item<float>();
}

}  // namespace ddp::testing
