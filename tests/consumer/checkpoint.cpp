// A module that is saved and loaded, by ddp::checkpoint, which brings ddp::core along.
#include <ddp/checkpointer.h>
#include <ddp/collectives.h>
#include <ddp/process_group.h>
#include <torch/nn/modules/linear.h>

#include <filesystem>
#include <iostream>

int main() {
  ddp::init_process_group();
  torch::nn::Linear linear(4, 2);
  const auto folder = std::filesystem::current_path() / "checkpoints_alone";
  ddp::Checkpointer checkpointer(folder.string());
  checkpointer.add("model", linear);
  checkpointer.save(1);
  auto ranks = torch::tensor(checkpointer.load_latest() == 1 ? 1 : 0);
  ddp::all_reduce(ranks);
  ddp::destroy_process_group();
  std::cout << "checkpoint: ok on " << ranks.item<int64_t>() << " rank(s)\n";
}
