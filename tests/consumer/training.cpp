// A prefetched step whose state is saved and loaded, by ddp::training, which brings ddp::core
// along.
#include <ddp/checkpointer.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/grad_scaler.h>
#include <ddp/metrics.h>
#include <ddp/process_group.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <filesystem>
#include <iostream>

int main() {
  ddp::init_process_group();
  torch::nn::Linear linear(4, 2);
  ddp::DistributedDataParallel model(linear);
  torch::optim::SGD optimizer(model->parameters(), /*lr=*/0.1);
  ddp::GradScaler scaler;
  scaler.scale(model->forward(torch::ones({2, 4})).sum()).backward();
  scaler.step(optimizer);
  scaler.update();

  const auto folder = std::filesystem::current_path() / "checkpoints";
  ddp::Checkpointer checkpointer(folder.string());
  checkpointer.add("model", model);
  checkpointer.save(1);
  const double ranks = ddp::sum(checkpointer.load_latest() == 1 ? 1 : 0);
  ddp::destroy_process_group();
  std::cout << "training: ok on " << ranks << " rank(s)\n";
}
