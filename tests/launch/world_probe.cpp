// One rank of a job. world_probe [BACKEND]: prints its place, and a sum that only all ranks
// together can compute, and fails if a step of training does not average their gradients.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>

#include <ddp/ddp.h>
#include <torch/torch.h>

namespace world_probe {
namespace {

/// One step of one weight, which is 0 on rank 0 and has a gradient of rank + 1.
double train() {
  torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
  torch::nn::init::constant_(net->weight, ddp::get_rank());
  ddp::DistributedDataParallel model(net);
  torch::optim::SGD optimizer(model->parameters(), 1.0);
  model->forward(torch::full({1, 1}, ddp::get_rank() + 1.0)).sum().backward();
  optimizer.step();
  return net->weight.item<double>();
}

}  // namespace

int main(int argc, char** argv) try {
  ddp::init_process_group(ddp::ProcessGroupOptions()
                              .backend(argc > 1 ? argv[1] : "gloo")
                              .timeout(std::chrono::seconds(60)));
  const int size = ddp::get_world_size();
  auto sum = torch::full({1}, static_cast<double>(ddp::get_rank()));
  ddp::all_reduce(sum);
  const double weight = train(), expected = -(size + 1) / 2.0;
  if (!(std::abs(weight - expected) < 1e-5)) {
    throw std::runtime_error(
        "expected a weight of " + std::to_string(expected) + ", got " + std::to_string(weight));
  }
  std::printf(
      "rank %d of %d sum %.0f local %d\n", ddp::get_rank(), size, sum.item<double>(),
      ddp::get_local_rank());
  ddp::destroy_process_group();
  return EXIT_SUCCESS;
} catch (const std::exception& error) {
  std::fprintf(stderr, "world_probe: %s\n", error.what());
  return EXIT_FAILURE;
}

}  // namespace world_probe
