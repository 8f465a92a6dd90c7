// Nets and values of parameters that depend on nothing else: the ranks' threads share one
// generator.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

namespace ddp::testing {

/// Standard normal, drawn as double.
inline at::Tensor draw_values(
    std::vector<int64_t> sizes, uint64_t seed, at::ScalarType dtype = at::kDouble) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(sizes, generator, at::TensorOptions(at::kDouble)).to(dtype);
}

/// Draws all parameters, one after the other, from a normal distribution.
inline void draw_normal(torch::nn::Module& module, double deviation, uint64_t seed = 1) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const at::NoGradGuard no_grad;
  for (auto& p : module.parameters()) p.normal_(0, deviation, generator);
}

/// Element i of parameter k becomes scale * sin(step * i + start + shift * k).
struct Waves {
  double step = 1.1;
  double start = 1;
  double shift = 1;
  double scale = 1;
};
inline void set_waves(torch::nn::Module& module, const Waves& waves = {}) {
  const at::NoGradGuard no_grad;
  double phase = waves.start;
  for (auto& p : module.parameters()) {
    const auto angles = at::arange(p.numel(), at::kDouble) * waves.step + phase;
    p.copy_((angles.sin() * waves.scale).view(p.sizes()));
    phase += waves.shift;
  }
}

/// A layer of one output, without bias, whose weights are all `weight`.
inline torch::nn::Linear make_linear(int64_t inputs = 1, double weight = 1) {
  torch::nn::Linear net(torch::nn::LinearOptions(inputs, 1).bias(false));
  torch::nn::init::constant_(net->weight, weight);
  return net;
}

}  // namespace ddp::testing
