// Averages the models whose states averaged_models.py wrote to a folder, and writes the averages
// there.
#include <map>
#include <memory>
#include <string>

#include <ddp/averaged_model.h>
#include <ddp/state_dict.h>
#include <torch/torch.h>

namespace ddp_averaged_models_world {

namespace {

constexpr int kSteps = 9;
constexpr int kMiddle = 4;

struct Net : torch::nn::Module {
  Net() {
    fc = register_module("fc", torch::nn::Linear(3, 4));
    bn = register_module("bn", torch::nn::BatchNorm1d(4));
    tied = register_module("tied", std::make_shared<torch::nn::Module>());
    tied->register_parameter("weight", fc->weight);
    tied->register_parameter("bias", torch::zeros({4}));
    register_parameter("low", torch::zeros({5}, torch::kBFloat16));
    register_parameter("wide", torch::zeros({2}, torch::kDouble));
    register_buffer("count", torch::zeros({2}, torch::kLong));
    register_buffer("scale", torch::zeros({3}));
  }
  at::Tensor forward(const at::Tensor& x) { return bn->forward(fc->forward(x)); }

  torch::nn::Linear fc{nullptr};
  torch::nn::BatchNorm1d bn{nullptr};
  std::shared_ptr<torch::nn::Module> tied;
};

struct Batches : torch::nn::Module {
  Batches() {
    for (int i = 0; i < 5; ++i) register_buffer("b" + std::to_string(i), torch::zeros({4 + i, 3}));
  }
};

std::map<std::string, ddp::AveragedModelOptions> cases() {
  using Options = ddp::AveragedModelOptions;
  return {
      {"swa", Options().ema(0.5).swa()},
      {"ema", Options().ema(0.9)},
      {"warmup", Options().ema(0.99).warmup(true)},
      {"swa_buffers", Options().use_buffers(true)},
      {"ema_buffers", Options().ema(0.999).use_buffers(true)}};
}

}  // namespace

int main(int /*argc*/, char** argv) {
  const std::string folder = std::string(argv[1]) + "/";
  Batches batches;
  ddp::load_state_dict(batches, folder + "batches.pt");
  for (const auto& [name, options] : cases()) {
    Net net;
    ddp::load_state_dict(net, folder + "step0.pt");
    auto average = std::make_unique<ddp::AveragedModel>(net, options);
    for (int step = 1; step <= kSteps; ++step) {
      ddp::load_state_dict(net, folder + "step" + std::to_string(step) + ".pt");
      average->update();
      if (step != kMiddle) continue;
      ddp::save_state_dict(*average, folder + name + ".middle.pt");
      average = std::make_unique<ddp::AveragedModel>(net, options);
      ddp::load_state_dict(*average, folder + name + ".python.pt");
    }
    ddp::save_state_dict(*average, folder + name + ".end.pt");
    average->update_bn(batches.buffers(), [&](auto& batch) { net.forward(batch); });
    ddp::save_state_dict(average->state_dict(), folder + name + ".bn.pt");
  }
  return 0;
}

}  // namespace ddp_averaged_models_world
