// One training step of a wrapped model, on as many ranks as ddprun or mpirun started, or alone.
// usage: consumer [BACKEND]
#include <ddp/ddp.h>
#include <torch/torch.h>

#include <iostream>

static_assert(
    __cplusplus / 100 % 100 == STANDARD, "compiled for another standard than was asked for");

int main(int argc, char** argv) {
  ddp::init_process_group(ddp::ProcessGroupOptions().backend(argc > 1 ? argv[1] : ""));
  torch::manual_seed(0);
  torch::nn::Linear linear(4, 2);
  ddp::DistributedDataParallel model(linear);
  torch::optim::SGD optimizer(model->parameters(), /*lr=*/0.1);

  const auto input = torch::randn({8, 4});
  const auto target = torch::randn({8, 2});
  const auto loss_now = [&] { return torch::mse_loss(model->forward(input), target); };

  auto before = loss_now();
  before.backward();
  optimizer.step();
  const auto after = loss_now();
  const double ranks = ddp::sum(1);
  ddp::destroy_process_group();

  if (!(after.item<float>() < before.item<float>())) {
    std::cerr << "expected a step to lower the loss, got " << before.item<float>() << " and then "
              << after.item<float>() << "\n";
    return 1;
  }
  std::cout << "C++" << STANDARD << ": ok on " << ranks << " rank(s)\n";
}
