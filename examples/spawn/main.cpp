// Starts its ranks itself, and averages gradients by hand: `spawn`. Built as run.py of PyTorch's
// tutorial "Writing distributed applications".
#include <ddp/ddp.h>
#include <torch/torch.h>

#include <iostream>

void average_gradients(torch::nn::Module& net) {
  for (auto& p : net.parameters()) {
    ddp::all_reduce(p.mutable_grad());
    p.mutable_grad().div_(ddp::get_world_size());
  }
}

void run(int rank) {
  ddp::init_process_group();
  torch::manual_seed(1234);  // the same net and the same order of points on every rank
  torch::nn::Sequential net(torch::nn::Linear(1, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
  torch::optim::Adam optimizer(net->parameters(), 0.01);
  const auto x = torch::linspace(-1, 1, 256).unsqueeze(1);
  const auto own = torch::randperm(256).chunk(ddp::get_world_size())[rank];  // this rank's points
  for (int epoch = 0; epoch < 100; ++epoch) {
    for (const auto& indices : own.split(16)) {
      const auto batch = x.index_select(0, indices);
      optimizer.zero_grad();
      torch::mse_loss(net->forward(batch), torch::sin(3 * batch)).backward();
      average_gradients(*net);
      optimizer.step();
    }
  }
  const auto loss = torch::mse_loss(net->forward(x), torch::sin(3 * x)).item<double>();
  std::cout << "rank " << rank << " of " << ddp::get_world_size() << ": loss " << loss << '\n';
}

int main() { ddp::spawn(2, run); }
