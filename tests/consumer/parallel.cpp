// A step of a fully sharded model, by ddp::parallel, which brings ddp::core along.
#include <ddp/fully_sharded.h>
#include <ddp/metrics.h>
#include <ddp/process_group.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <iostream>

int main() {
  ddp::init_process_group();
  torch::nn::Linear linear(4, 2);
  ddp::FullyShardedDataParallel model(linear);
  torch::optim::SGD optimizer(model->parameters(), /*lr=*/0.1);
  model->forward(torch::ones({2, 4})).sum().backward();
  optimizer.step();
  const double ranks = ddp::sum(1);
  ddp::destroy_process_group();
  std::cout << "parallel: ok on " << ranks << " rank(s)\n";
}
