#pragma once

#include <cstdint>

#include <torch/nn/modules/container/sequential.h>

namespace gan {

/// The shape of both networks.
struct NetworkOptions {
  int64_t size = 8;        // height and width of images, a multiple of 4
  bool batch_norm = true;  // in the generator
};

/// The number of noise elements from which one sample is made.
constexpr int64_t kNoise = 32;

/// Maps [N, kNoise] standard normal noise to [N, 1, size, size] images in [-1, 1].
///
/// A small DCGAN (Radford et al., arXiv:1511.06434).
///
/// \throws c10::ValueError  a size that is no multiple of 4.
torch::nn::Sequential make_generator(const NetworkOptions& options);

/// Maps [N, 1, size, size] images to [N] logits: positive for an image that looks real.
///
/// Has no BatchNorm, so the logit of an image does not depend on the batch it is in.
torch::nn::Sequential make_discriminator(const NetworkOptions& options);

}  // namespace gan
