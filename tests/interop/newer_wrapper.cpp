// A line-by-line port of newer_wrapper.py.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

namespace ddp_newer_wrapper {

namespace {

constexpr int kSteps = 6;

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(norm(conv(x))).flatten(1);
    return last(torch::relu(hidden(x)));
  }

  torch::nn::Conv2d conv{
      register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).bias(false)))};
  torch::nn::BatchNorm2d norm{register_module("norm", torch::nn::BatchNorm2d(4))};
  torch::nn::Linear hidden{register_module("hidden", torch::nn::Linear(64, 16))};
  torch::nn::Linear last{register_module("last", torch::nn::Linear(16, 3))};
};
TORCH_MODULE(Net);

using Options = ddp::DistributedDataParallelOptions;

torch::Tensor numbers(at::IntArrayRef shape, int64_t seed) {
  const auto places = torch::arange(c10::multiply_integers(shape));
  const auto whole = (places * 37 + seed * 11 + places * places) % 101 - 50;
  return (whole.to(torch::kDouble) / 50).view(shape);
}

void print_of_all(const std::string& name, const torch::Tensor& value) {
  std::vector<torch::Tensor> gathered(2);
  for (auto& one : gathered) one = torch::empty_like(value);
  ddp::all_gather(gathered, value.detach());
  if (ddp::get_rank() != 0) return;
  std::printf(
      "%s: %.17g %.17g\n", name.c_str(), gathered[0].item<double>(), gathered[1].item<double>());
}

void train(const std::string& name, Options options, bool by_hand = false, int passes = 1) {
  const int rank = ddp::get_rank();
  Net net;
  net->to(torch::kDouble);
  {
    const torch::NoGradGuard no_grad;
    int64_t seed = 0;
    for (auto& parameter : net->parameters()) {
      parameter.copy_(numbers(parameter.sizes(), seed++) / 2);
    }
    net->norm->running_mean.fill_(rank + 1);
  }
  ddp::DistributedDataParallel<Net> model(net, options.bucket_cap_mb(0.001));
  model->require_manual_backward_finalization(by_hand);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    torch::Tensor loss;
    const auto pass = [&](int p) {
      const auto x = numbers({4, 1, 6, 6}, rank + 2 * p);
      loss = torch::nn::functional::mse_loss(model(x), numbers({4, 3}, rank));
      loss.backward();
    };
    for (int p = 0; p < passes - 1; ++p) {
      const auto guard = model->no_sync();
      pass(p);
    }
    pass(passes - 1);
    if (by_hand) model->finalize_backward();
    optimizer.step();
    optimizer.zero_grad();
    print_of_all(name + ": step " + std::to_string(step), loss);
  }
  print_of_all(name + ": mean", net->norm->running_mean.sum());
  auto weights = torch::zeros({}, torch::kDouble);
  for (const auto& parameter : net->parameters()) weights += parameter.detach().cos().sum();
  print_of_all(name + ": weights", weights);
}

}  // namespace

int main(int /*argc*/, char** /*argv*/) {
  torch::set_num_threads(1);
  ddp::init_process_group();
  train("buffers synchronised", Options().forward_sync_buffers(true));
  train("buffers synchronised at construction", Options().forward_sync_buffers(false));
  train("buffers never synchronised", Options().broadcast_buffers(false));
  train("lazy buckets", Options().lazy_bucket_allocation(true));
  train(
      "lazy buckets, views", Options().lazy_bucket_allocation(true).gradient_as_bucket_view(true));
  train("by hand", Options(), /*by_hand=*/true);
  train(
      "by hand, 2 passes a step", Options().lazy_bucket_allocation(true), /*by_hand=*/true,
      /*passes=*/2);
  ddp::destroy_process_group();
  return EXIT_SUCCESS;
}

}  // namespace ddp_newer_wrapper
