// Fits a line to noisy points on any number of ranks: `ddprun -n 2 minimal`.
#include <ddp/ddp.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  ddp::init_process_group();  // the ranks find each other by what ddprun set

  torch::manual_seed(0);  // the same points on every rank: y = 3x - 1, and a little noise
  const auto x = torch::rand({256, 1});
  const auto y = 3 * x - 1 + 0.01 * torch::randn({256, 1});
  auto points = torch::data::datasets::TensorDataset(torch::cat({x, y}, 1))
                    .map(torch::data::transforms::Stack<torch::data::TensorExample>());

  ddp::DistributedSampler sampler(*points.size());
  auto loader = torch::data::make_data_loader(points, sampler, /*options=*/16);

  torch::nn::Linear line(1, 1);
  ddp::DistributedDataParallel model(line);
  torch::optim::SGD optimizer(model->parameters(), /*lr=*/0.3);

  for (size_t epoch = 0; epoch < 20; ++epoch) {
    sampler.set_epoch(epoch);
    for (const auto& batch : *loader) {
      optimizer.zero_grad();
      const auto parts = batch.data.chunk(2, /*dim=*/1);
      torch::mse_loss(model->forward(parts[0]), parts[1]).backward();
      optimizer.step();
    }
  }

  if (ddp::is_main()) {
    std::cout << "y = " << line->weight.item<float>() << " x + " << line->bias.item<float>() << '\n'
              << ddp::summary(model->stats()) << '\n';
  }
  ddp::destroy_process_group();
}
