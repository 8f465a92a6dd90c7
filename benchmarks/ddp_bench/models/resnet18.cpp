#include "resnet18.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

namespace ddp_bench {
namespace {

torch::nn::Conv2d convolution(int64_t in, int64_t out, int64_t kernel, int64_t stride) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

class ResidualBlock : public torch::nn::Module {
 public:
  ResidualBlock(int64_t in, int64_t out, int64_t stride)
      : conv1_(register_module("conv1", convolution(in, out, 3, stride))),
        bn1_(register_module("bn1", torch::nn::BatchNorm2d(out))),
        conv2_(register_module("conv2", convolution(out, out, 3, 1))),
        bn2_(register_module("bn2", torch::nn::BatchNorm2d(out))) {
    if (stride == 1 && in == out) return;
    shortcut_ = register_module(
        "shortcut",
        torch::nn::Sequential(convolution(in, out, 1, stride), torch::nn::BatchNorm2d(out)));
  }

  at::Tensor forward(const at::Tensor& x) {
    auto y = at::relu(bn1_(conv1_(x)));
    y = bn2_(conv2_(y));
    return at::relu(y + (shortcut_.is_empty() ? x : shortcut_->forward(x)));
  }

 private:
  torch::nn::Conv2d conv1_;
  torch::nn::BatchNorm2d bn1_;
  torch::nn::Conv2d conv2_;
  torch::nn::BatchNorm2d bn2_;
  torch::nn::Sequential shortcut_ = nullptr;
};

class ResNet18 : public Net {
 public:
  ResNet18()
      : stem_(register_module(
            "stem", torch::nn::Sequential(convolution(3, 64, 3, 1), torch::nn::BatchNorm2d(64)))),
        blocks_(register_module("blocks", torch::nn::Sequential())) {
    int64_t in = 64;
    for (const int64_t out : {64, 128, 256, 512}) {
      blocks_->push_back(std::make_shared<ResidualBlock>(in, out, out == in ? 1 : 2));
      blocks_->push_back(std::make_shared<ResidualBlock>(out, out, 1));
      in = out;
    }
    head_ = register_module("head", torch::nn::Linear(in, 10));
  }

  at::Tensor forward(const at::Tensor& x) override {
    const auto features = blocks_->forward(at::relu(stem_->forward(x)));
    return head_(features.mean({2, 3}));
  }

 private:
  torch::nn::Sequential stem_;
  torch::nn::Sequential blocks_;
  torch::nn::Linear head_ = nullptr;
};

}  // namespace

std::shared_ptr<Net> make_resnet18() { return std::make_shared<ResNet18>(); }

}  // namespace ddp_bench
