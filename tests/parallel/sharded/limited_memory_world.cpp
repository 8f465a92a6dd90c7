// Trains a model whose parameters, gradients and optimizer state are four times what a rank may
// allocate: `ddprun -n 8 limited_memory_world sharded`. With `whole` each rank has all of it, and
// fails.
#include <malloc.h>
#include <sys/resource.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <string>

#include <ddp/ddp.h>
#include <torch/torch.h>

namespace limited_memory_world {

namespace {

constexpr int64_t kLayers = 32;
constexpr int64_t kWidth = 1024;
constexpr int64_t kStateBytes = 16 * kLayers * kWidth * kWidth;

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(int64_t width)
      : fc(register_module(
            "fc", torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)))) {}
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(fc->forward(x)) + x; }
  torch::nn::Linear fc;
};
TORCH_MODULE(Layer);

torch::nn::Sequential layers(int64_t width) {
  torch::nn::Sequential net;
  for (int64_t i = 0; i < kLayers; ++i) net->push_back(Layer(width));
  return net;
}

double train(torch::nn::Sequential net, bool shards, int64_t width) {
  ddp::FullyShardedOptions options;
  if (shards) ddp::fully_shard(net, width * width, options);
  const auto run = [&](auto& model) {
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
    double loss = 0;
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      const auto value = model->forward(torch::ones({4, width})).square().mean();
      value.backward();
      optimizer.step();
      loss = value.template item<double>();
    }
    return loss;
  };
  if (!shards) return run(net);
  ddp::FullyShardedDataParallel model(net, options);
  return run(model);
}

/// Private memory that the process may write, as the kernel counts it for RLIMIT_DATA.
int64_t data_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kilobytes = 0;
    if (word == "VmData:" && status >> kilobytes) return kilobytes * 1024;
  }
  return 0;
}

void limit_memory(int64_t more) {
  const auto bytes = static_cast<rlim_t>(data_bytes() + more);
  const rlimit limit{bytes, bytes};
  TORCH_CHECK(::setrlimit(RLIMIT_DATA, &limit) == 0, "setrlimit failed");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  // As docs/fully_sharded.md says: by default malloc keeps freed gradients between other memory.
  mallopt(M_MMAP_THRESHOLD, 1 << 18);
  try {
    torch::set_num_threads(1);
    // Over Gloo all memory is the process's own.
    ddp::init_process_group(ddp::ProcessGroupOptions().backend("gloo"));
    const ddp::FullyShardedDataParallel small(torch::nn::Linear(1, 1));  // has the model's groups
    train(layers(8), /*shards=*/true, 8);
    limit_memory(kStateBytes / 4);
    torch::nn::Sequential net(nullptr);
    {
      const ddp::DeferredInit guard;
      net = layers(kWidth);
    }
    if (mode == "whole") ddp::materialize(*net);
    const auto loss = train(net, mode == "sharded", kWidth);
    std::printf("trained: loss %.4f\n", loss);
    std::fflush(stdout);
    ddp::barrier();
  } catch (const std::exception& error) {
    std::printf("failed: %.200s\n", error.what());
    return 1;
  }
  ddp::destroy_process_group();
  return 0;
}

}  // namespace limited_memory_world
