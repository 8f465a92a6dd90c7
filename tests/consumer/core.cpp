// A step of a wrapped model, by ddp::core alone.
#include <ddp/distributed_data_parallel.h>
#include <ddp/metrics.h>
#include <ddp/process_group.h>
#include <ddp/sampler.h>
#include <ddp/zero.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <iostream>

int main() {
  ddp::init_process_group();
  torch::nn::Linear linear(4, 2);
  ddp::DistributedDataParallel model(linear);
  ddp::DistributedSampler sampler(/*size=*/8);
  ddp::ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(
      model, torch::optim::SGDOptions(/*lr=*/0.1));
  const auto indices = sampler.next(4).value();
  model->forward(torch::ones({static_cast<int64_t>(indices.size()), 4})).sum().backward();
  optimizer.step();
  const double ranks = ddp::sum(1);
  ddp::destroy_process_group();
  std::cout << "core: ok on " << ranks << " rank(s)\n";
}
