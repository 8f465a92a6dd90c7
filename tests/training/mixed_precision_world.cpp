// Prints the values that mixed_precision.py compares: scales and steps of a GradScaler that is
// reloaded from its archive now and then, and the losses of a network under an AutocastGuard.
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <ddp/autocast.h>
#include <ddp/grad_scaler.h>
#include <ddp/state_dict.h>
#include <torch/torch.h>

#include "support/archives.h"

namespace ddp_mixed_precision_world {

namespace {

/// Saves the scaler and loads it into a new one.
ddp::GradScaler reloaded(const ddp::GradScaler& scaler) {
  auto in = ddp::testing::reread(scaler);
  ddp::GradScaler loaded;
  loaded.load(in);
  return loaded;
}

/// Reads `_growth_tracker`, which is private in the scaler but public in its archive.
long growth_tracker(const ddp::GradScaler& scaler) {
  c10::IValue value;
  ddp::testing::reread(scaler).read("_growth_tracker", value);
  return static_cast<long>(value.toInt());
}

void print_scales(double init_scale) {
  ddp::GradScaler scaler(ddp::GradScalerOptions().init_scale(init_scale).growth_interval(5));
  std::vector<at::Tensor> parameters{torch::zeros({3}), torch::zeros({3})};
  std::vector<std::unique_ptr<torch::optim::SGD>> optimizers;
  for (const auto& p : parameters) {
    optimizers.push_back(std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{p}, 0.1));
  }
  std::string values[2];
  std::string new_scale;
  int unscales = 0;
  for (int line = 0; std::cin >> values[0] >> values[1] >> new_scale >> unscales; ++line) {
    bool stepped[2];
    for (size_t i = 0; i < 2; ++i) {
      const auto loss = scaler.scale(torch::tensor({1.0F, std::stof(values[i]), 2.0F}) * 0.001);
      parameters[i].mutable_grad() = loss;  // the gradient of the scaled loss
      if (unscales != 0) scaler.unscale_(*optimizers[i]);
      stepped[i] = scaler.step(*optimizers[i]);
    }
    new_scale == "-" ? scaler.update() : scaler.update(std::stod(new_scale));
    if (line % 7 == 0) scaler = reloaded(scaler);
    std::printf(
        "%.9g %ld %d %d", scaler.get_scale(), growth_tracker(scaler), stepped[0], stepped[1]);
    for (const auto& p : parameters) {
      for (int64_t i = 0; i < 3; ++i) std::printf(" %.9g", p[i].item<float>());
    }
    std::printf("\n");
  }
}

struct Net : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(conv(norm(x.view({-1, 1, 64})).view({-1, 1, 8, 8})));
    return fc2(torch::softmax(fc1(x.flatten(1)), 1));
  }

  torch::nn::Conv2d conv{
      register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).padding(1)))};
  torch::nn::LayerNorm norm{
      register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})))};
  torch::nn::Linear fc1{register_module("fc1", torch::nn::Linear(4 * 64, 32))};
  torch::nn::Linear fc2{register_module("fc2", torch::nn::Linear(32, 10))};
};

const char* name_of(at::ScalarType type) {
  return type == at::kFloat ? "float32" : type == at::kHalf ? "float16" : "bfloat16";
}

void print_losses(at::ScalarType dtype, bool scales, const std::string& file) {
  Net net;
  ddp::load_state_dict(net, file);
  ddp::GradScaler scaler(ddp::GradScalerOptions().enabled(scales).growth_interval(4));
  torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  for (uint64_t step = 0; step < 20; ++step) {
    auto generator = at::detail::createCPUGenerator(step);
    const auto x = torch::randn({16, 64}, generator);
    const auto y = torch::randint(10, {16}, generator, torch::kLong);
    optimizer.zero_grad();
    at::Tensor output;
    at::Tensor loss;
    {
      const ddp::AutocastGuard autocast(torch::kCPU, dtype);
      output = net.forward(x);
      loss = torch::nn::functional::cross_entropy(output, y);
    }
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);
    const double norm = torch::nn::utils::clip_grad_norm_(net.parameters(), 1.0);
    scaler.step(optimizer);
    scaler.update();
    std::printf(
        "%.9g %.9g %.9g %s %s\n", loss.item<float>(), norm, scaler.get_scale(),
        name_of(output.scalar_type()), name_of(loss.scalar_type()));
  }
}

}  // namespace

int main(int argc, char** argv) {
  torch::set_num_threads(1);
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.at(0) == "scales") {
    print_scales(std::stod(arguments.at(1)));
  } else {
    const auto dtype = arguments.at(1) == "float16" ? at::kHalf : at::kBFloat16;
    print_losses(dtype, arguments.at(2) == "1", arguments.at(3));
  }
  return EXIT_SUCCESS;
}

}  // namespace ddp_mixed_precision_world
