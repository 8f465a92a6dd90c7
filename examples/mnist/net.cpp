#include "net.h"

#include <ATen/ATen.h>

namespace mnist {

NetImpl::NetImpl(const Dropout& dropout)
    : conv1(register_module("conv1", torch::nn::Conv2d(1, 32, /*kernel_size=*/3))),
      conv2(register_module("conv2", torch::nn::Conv2d(32, 64, /*kernel_size=*/3))),
      dropout1(register_module("dropout1", torch::nn::Dropout(dropout.after_pool))),
      dropout2(register_module("dropout2", torch::nn::Dropout(dropout.after_fc1))),
      fc1(register_module("fc1", torch::nn::Linear(64 * 12 * 12, 128))),
      fc2(register_module("fc2", torch::nn::Linear(128, 10))) {}

at::Tensor NetImpl::forward(at::Tensor x) {
  x = at::relu(conv1(x));              // 26 x 26
  x = at::relu(conv2(x));              // 24 x 24
  x = dropout1(at::max_pool2d(x, 2));  // 12 x 12
  x = dropout2(at::relu(fc1(x.flatten(1))));
  return at::log_softmax(fc2(x), 1);
}

}  // namespace mnist
