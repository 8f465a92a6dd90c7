// One rank of the run that mixed_precision.py compares. Arguments: PARAM_DTYPE REDUCE_DTYPE FOLDER
#include <cstdio>
#include <cstdlib>
#include <string>

#include <ddp/ddp.h>
#include <ddp/state_dict.h>
#include <torch/torch.h>

namespace ddp_mixed_precision_rank {

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() { fc1->bias.requires_grad_(false); }

  torch::Tensor forward(torch::Tensor x, const torch::Tensor& tokens) {
    x = norm(x + embedding(tokens));
    x = torch::relu(conv(x.view({-1, 1, 8, 8})));
    return fc2(torch::tanh(fc1(x.flatten(1))));
  }

  torch::nn::Embedding embedding{register_module("embedding", torch::nn::Embedding(11, 64))};
  torch::nn::Conv2d conv{
      register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).padding(1)))};
  torch::nn::LayerNorm norm{
      register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})))};
  torch::nn::Linear fc1{register_module("fc1", torch::nn::Linear(4 * 64, 32))};
  torch::nn::Linear fc2{register_module("fc2", torch::nn::Linear(32, 10))};
};
TORCH_MODULE(Net);

at::ScalarType dtype_of(const std::string& name) {
  return name == "bfloat16" ? at::kBFloat16 : name == "float16" ? at::kHalf : at::kFloat;
}

}  // namespace

int main(int /*argc*/, char** argv) {
  torch::set_num_threads(1);
  ddp::init_process_group(ddp::ProcessGroupOptions().backend("gloo"));
  const std::string folder = argv[3];
  Net net;
  ddp::load_state_dict(*net, folder + "/start.pt");
  ddp::DistributedDataParallel model(
      net,
      ddp::DistributedDataParallelOptions().mixed_precision(
          ddp::MixedPrecision().param_dtype(dtype_of(argv[1])).reduce_dtype(dtype_of(argv[2]))));
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 6; ++step) {
    auto generator = at::detail::createCPUGenerator(10 * step + ddp::get_rank());
    const auto x = torch::randn({8, 64}, generator);
    const auto tokens = torch::randint(11, {8}, generator, torch::kLong);
    const auto y = torch::randint(10, {8}, generator, torch::kLong);
    optimizer.zero_grad();
    const auto loss =
        torch::nn::functional::cross_entropy(model->forward(x, tokens).to(torch::kFloat), y);
    constexpr double kScale = 1024;
    (loss * kScale).backward();
    for (const auto& p : net->parameters()) {
      if (p.grad().defined()) p.grad().div_(kScale);
    }
    optimizer.step();
    std::printf("%.9g\n", loss.item<float>());
  }
  if (ddp::get_rank() == 0) ddp::save_state_dict(*net, folder + "/ours.pt");
  ddp::destroy_process_group();
  return EXIT_SUCCESS;
}

}  // namespace ddp_mixed_precision_rank
