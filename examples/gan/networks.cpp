#include "networks.h"

#include <c10/util/Exception.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

namespace gan {
namespace {

namespace nn = torch::nn;

constexpr int64_t kQuarterSizeChannels =
    64;  // channels where an image has a quarter of its height and width
constexpr int64_t kHalfSizeChannels = 32;  // channels where it has half

nn::ConvTranspose2d doubling(int64_t in, int64_t out) {
  return nn::ConvTranspose2d(
      nn::ConvTranspose2dOptions(in, out, /*kernel_size=*/4).stride(2).padding(1));
}

nn::Conv2d halving(int64_t in, int64_t out) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, /*kernel_size=*/4).stride(2).padding(1));
}

nn::LeakyReLU leaky() { return nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2)); }

void add_activation(nn::Sequential& layers, int64_t channels, const NetworkOptions& options) {
  if (options.batch_norm) layers->push_back(nn::BatchNorm2d(channels));
  layers->push_back(nn::ReLU());
}

}  // namespace

nn::Sequential make_generator(const NetworkOptions& options) {
  TORCH_CHECK_VALUE(
      options.size > 0 && options.size % 4 == 0,
      "make_generator: expected a size that is a multiple of 4, got ", options.size, ".");
  nn::Sequential layers(
      nn::Unflatten(nn::UnflattenOptions(1, {kNoise, 1, 1})),
      nn::ConvTranspose2d(
          nn::ConvTranspose2dOptions(kNoise, kQuarterSizeChannels, options.size / 4)));
  add_activation(layers, kQuarterSizeChannels, options);
  layers->push_back(doubling(kQuarterSizeChannels, kHalfSizeChannels));
  add_activation(layers, kHalfSizeChannels, options);
  layers->push_back(doubling(kHalfSizeChannels, 1));
  layers->push_back(nn::Tanh());
  return layers;
}

nn::Sequential make_discriminator(const NetworkOptions& options) {
  return nn::Sequential(
      halving(1, kHalfSizeChannels), leaky(), halving(kHalfSizeChannels, kQuarterSizeChannels),
      leaky(), nn::Conv2d(nn::Conv2dOptions(kQuarterSizeChannels, 1, options.size / 4)),
      nn::Flatten(nn::FlattenOptions().start_dim(0)));
}

}  // namespace gan
