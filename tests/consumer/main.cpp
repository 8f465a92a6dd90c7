// One training step of a wrapped model, in a world of one rank that needs no launcher.
#include <ddp/ddp.h>
#include <torch/torch.h>

#include <iostream>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

int main() {
  ddp::init_process_group(ddp::ProcessGroupOptions()
                              .store(c10::make_intrusive<c10d::HashStore>())
                              .rank(0)
                              .world_size(1));
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
  ddp::destroy_process_group();

  if (!(after.item<float>() < before.item<float>())) {
    std::cerr << "expected a step to lower the loss, got " << before.item<float>() << " and then "
              << after.item<float>() << "\n";
    return 1;
  }
  std::cout << "ok\n";
}
