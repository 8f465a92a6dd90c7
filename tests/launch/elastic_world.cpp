// A rank of a run whose hosts come and go: learns y = 3 x - 1, and resumes from its last
// checkpoint. elastic_world FOLDER: trains until rank 0 finds FOLDER/enough.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>

#include <ddp/ddp.h>
#include <torch/torch.h>

namespace elastic_world {

namespace {

void print_line(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

bool is_enough(const std::string& folder) {
  auto enough = torch::zeros({1});
  if (ddp::get_rank() == 0 && ::access((folder + "/enough").c_str(), F_OK) == 0) enough.fill_(1);
  ddp::broadcast(enough, 0);
  return enough.item<float>() > 0;
}

void run(const std::string& folder) {
  ddp::init_process_group();
  torch::manual_seed(1);
  torch::nn::Linear net(1, 1);
  ddp::DistributedDataParallel model(net);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
  ddp::Checkpointer checkpointer(
      folder + "/checkpoints", ddp::CheckpointerOptions().every_steps(5));
  checkpointer.add("model", model).add("optimizer", optimizer);
  auto step = checkpointer.load_latest().value_or(0);
  const auto world = std::to_string(ddp::get_world_size());
  if (ddp::get_rank() == 0) print_line(world + " ranks resumed after step " + std::to_string(step));
  torch::manual_seed(100 * static_cast<uint64_t>(step) + static_cast<uint64_t>(ddp::get_rank()));

  while (!is_enough(folder)) {
    const auto x = torch::rand({16, 1}) * 2 - 1;
    optimizer.zero_grad();
    (model->forward(x) - (3 * x - 1)).pow(2).mean().backward();
    optimizer.step();
    checkpointer.maybe_save(++step);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // other hosts need the cores
  }
  checkpointer.wait();
  model->check_replicas();
  if (ddp::get_rank() == 0) {
    print_line(
        world + " ranks ended equal, with y = " + std::to_string(net->weight.item<float>()) +
        " x + " + std::to_string(net->bias.item<float>()));
  }
  ddp::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 2) return 2;
  run(argv[1]);
  return EXIT_SUCCESS;
} catch (const std::exception& error) {
  std::fprintf(stderr, "elastic_world: %s\n", error.what());
  return EXIT_FAILURE;
}

}  // namespace elastic_world
