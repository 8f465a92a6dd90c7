#include "net.h"

#include <c10/util/Exception.h>
#include <ddp/sync_batch_norm.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/activation.h>

namespace cifar10 {
namespace {

namespace nn = torch::nn;

nn::Sequential convolution(
    int64_t in, int64_t out, int64_t size, int64_t stride, const NetOptions& options) {
  nn::Conv2d conv(
      nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(!options.batch_norm));
  nn::init::kaiming_normal_(conv->weight, 0, torch::kFanOut, torch::kReLU);
  nn::Sequential layers(conv);
  if (!options.batch_norm) return layers;
  if (options.sync_batch_norm) {
    layers->push_back(
        ddp::SyncBatchNorm2d(ddp::SyncBatchNormOptions(out).process_group(options.group)));
  } else {
    layers->push_back(nn::BatchNorm2d(out));
  }
  return layers;
}

/// A residual block: two convolutions and a shortcut around them.
struct BlockImpl : nn::Module {
  BlockImpl(int64_t in, int64_t out, int64_t stride, const NetOptions& options)
      : first(register_module("first", convolution(in, out, 3, stride, options))),
        second(register_module("second", convolution(out, out, 3, 1, options))) {
    if (in != out || stride != 1) {
      shortcut = register_module("shortcut", convolution(in, out, 1, stride, options));
    }
  }

  at::Tensor forward(const at::Tensor& x) {
    const auto y = second->forward(first->forward(x).relu_());
    return (y + (shortcut.is_empty() ? x : shortcut->forward(x))).relu_();
  }

  nn::Sequential first, second, shortcut{nullptr};
};
TORCH_MODULE(Block);

}  // namespace

NetOptions net_options(const std::string& model) {
  if (model == "small") return {{16, 32, 64}, 1};
  TORCH_CHECK_VALUE(model == "resnet18", "--model: expected small or resnet18, got ", model, ".");
  return {{64, 128, 256, 512}, 2};
}

NetImpl::NetImpl(const NetOptions& options)
    : stem(register_module("stem", convolution(3, options.widths.front(), 3, 1, options))),
      stages(register_module("stages", nn::Sequential())),
      head(register_module("head", nn::Linear(options.widths.back(), options.classes))) {
  auto in = options.widths.front();
  for (size_t stage = 0; stage < options.widths.size(); ++stage) {
    for (int64_t block = 0; block < options.blocks; ++block) {
      const int64_t stride = stage > 0 && block == 0 ? 2 : 1;
      stages->push_back(Block(in, options.widths[stage], stride, options));
      in = options.widths[stage];
    }
  }
}

at::Tensor NetImpl::forward(const at::Tensor& images) {
  return head->forward(stages->forward(stem->forward(images).relu_()).mean({2, 3}));
}

}  // namespace cifar10
