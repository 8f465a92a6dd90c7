// replay_world [STEPS [EVERY]]: trains a net with dropout, compares replicas and replays batches in
// one step of EVERY: ranks that are processes have generators of their own. Writes a line once the
// parameters are as without that. For false alarms: ddprun -n 3 ddp_replay_world 1000000 50
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

namespace ddp_replay_world {

namespace {

std::vector<at::Tensor> train(int64_t steps, int64_t every) {
  torch::manual_seed(1);
  torch::nn::Sequential net(
      torch::nn::Linear(6, 9), torch::nn::BatchNorm1d(9), torch::nn::Dropout(0.4),
      torch::nn::Linear(9, 3));
  ddp::DistributedDataParallel model(
      net, ddp::DistributedDataParallelOptions()
               .replay_every(every)
               .vote(every > 0)
               .check_replicas_every(every));
  torch::optim::Adam optimizer(model->parameters());
  model->also_compare({&optimizer});
  torch::manual_seed(10 + ddp::get_rank());
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    model->forward(torch::randn({5, 6})).square().sum().backward();
    optimizer.step();
  }
  auto values = net->parameters();
  for (const auto& buffer : net->buffers()) values.push_back(buffer);
  return values;
}

}  // namespace

int main(int argc, char** argv) try {
  const int64_t steps = argc > 1 ? std::atoll(argv[1]) : 20;
  const int64_t every = argc > 2 ? std::atoll(argv[2]) : 2;
  ddp::init_process_group();
  const auto with = train(steps, every), without = train(steps, 0);
  for (size_t i = 0; i < with.size(); ++i) {
    if (!with[i].equal(without[i])) {
      std::fprintf(stderr, "value %zu is another one after replays\n", i);
      return EXIT_FAILURE;
    }
  }
  if (ddp::get_rank() == 0) std::puts("equal");
  ddp::destroy_process_group();
  return EXIT_SUCCESS;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return EXIT_FAILURE;
}

}  // namespace ddp_replay_world
