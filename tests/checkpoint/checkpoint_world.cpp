// A rank of a run that is killed and resumed: trains on random data, saves in the background, and
// prints a hash of its final state. checkpoint_world FOLDER STEPS; with "sharded" after these, a
// sharded model makes one step, and rank 0 prints hashes of the whole state that it loads and
// saves.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "support/foreign_locale.h"

namespace ddp_checkpoint_world {

namespace {

// FNV-1a over the bytes in memory order.
uint64_t hash_of(const std::vector<at::Tensor>& tensors) {
  uint64_t hash = 14695981039346656037ULL;
  for (const auto& tensor : tensors) {
    const auto dense = tensor.detach().contiguous();
    const auto* bytes = static_cast<const unsigned char*>(dense.const_data_ptr());
    for (size_t i = 0; i < dense.nbytes(); ++i) hash = (hash ^ bytes[i]) * 1099511628211ULL;
  }
  return hash;
}

void run(const std::string& folder, int64_t steps) {
  ddp::init_process_group();
  const int rank = ddp::get_rank();
  torch::manual_seed(5);
  torch::nn::Sequential net(
      torch::nn::Linear(64, 512), torch::nn::Dropout(0.5), torch::nn::BatchNorm1d(512),
      torch::nn::Linear(512, 16));
  ddp::DistributedDataParallel model(net);
  torch::optim::AdamW optimizer(model->parameters(), 0.01);
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/20, /*gamma=*/0.9);
  ddp::DistributedSampler sampler(50, ddp::DistributedSamplerOptions().advance_epoch(true));
  torch::manual_seed(100 + rank);

  ddp::Checkpointer checkpointer(folder, ddp::CheckpointerOptions().every_steps(3).keep_last(2));
  checkpointer.add("model", model).add("optimizer", optimizer).add("scheduler", scheduler);
  checkpointer.add("sampler", sampler);
  // One row a rank of a tensor that is cut over the ranks.
  auto row = torch::zeros({1, 5000});
  checkpointer.add_sharded("rows", [&] {
    return std::vector<ddp::ShardedTensor>{{"rows", {ddp::get_world_size(), 5000}, {rank, 0}, row}};
  });
  const auto begun = checkpointer.load_latest().value_or(0);
  std::printf("pid %d begins after %lld\n", getpid(), static_cast<long long>(begun));
  std::fflush(stdout);

  for (auto step = begun; step < steps;) {
    auto indices = sampler.next(4);
    if (!indices) {
      sampler.reset();
      indices = sampler.next(4);
    }
    const auto shift = static_cast<double>(indices->front());
    const auto x = torch::sin(torch::arange(16.0 * 64, torch::kFloat) * shift).view({16, 64});
    optimizer.zero_grad();
    (model->forward(x) - torch::randn({16, 16})).pow(2).mean().backward();
    optimizer.step();
    scheduler.step();
    row.mul_(0.5).add_(x.sum() + rank);
    checkpointer.maybe_save(++step);
    std::printf("step %lld\n", static_cast<long long>(step));
    std::fflush(stdout);
  }
  checkpointer.wait();
  auto values = net->parameters();
  for (const auto& buffer : net->buffers()) values.push_back(buffer);
  values.push_back(row);
  values.push_back(torch::rand({1}));
  std::printf("end %016llx\n", static_cast<unsigned long long>(hash_of(values)));
  ddp::destroy_process_group();
}

/// Of a sharded model and its optimizer, on any number of ranks the same. Collective.
uint64_t hash_of_whole(
    const ddp::FullyShardedDataParallel<torch::nn::Sequential>& model,
    torch::optim::AdamW& optimizer) {
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> all, kept;
  const auto add = [&] {
    for (const auto& item : ddp::full_state_dict(*model)) all.push_back(item.value());
  };
  add();
  for (auto& p : model->parameters()) kept.push_back(p.clone());
  for (const bool is_square : {false, true}) {
    for (auto& p : model->parameters()) {
      const auto found = optimizer.state().find(p.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      auto& state = static_cast<torch::optim::AdamWParamState&>(*found->second);
      p.copy_(is_square ? state.exp_avg_sq() : state.exp_avg());
    }
    add();
  }
  for (size_t i = 0; i < kept.size(); ++i) model->parameters()[i].copy_(kept[i]);
  return hash_of(all);
}

void run_sharded(const std::string& folder) {
  ddp::init_process_group();
  torch::manual_seed(5);
  torch::nn::Sequential net(torch::nn::Linear(24, 41), torch::nn::Linear(41, 7));
  ddp::fully_shard(net, /*min_num_params=*/500);
  ddp::FullyShardedDataParallel<torch::nn::Sequential> model(net);
  torch::optim::AdamW optimizer(model->parameters(), 0.01);
  ddp::Checkpointer checkpointer(folder, ddp::CheckpointerOptions().keep_last(1));
  checkpointer.add("model", model).add("optimizer", optimizer);
  const auto print = [&](const char* what, int64_t step) {
    const auto hash = static_cast<unsigned long long>(hash_of_whole(model, optimizer));
    if (ddp::is_main()) std::printf("%s %lld %016llx\n", what, static_cast<long long>(step), hash);
    std::fflush(stdout);
  };
  const auto begun = checkpointer.load_latest().value_or(0);
  if (begun > 0) print("loaded", begun);
  model->forward(torch::randn({5, 24})).pow(2).mean().backward();
  optimizer.step();
  print("saves", begun + 1);
  checkpointer.save(begun + 1);
  checkpointer.wait();
  ddp::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  try {
    if (argc == 4) {
      run_sharded(argv[1]);
    } else {
      run(argv[1], std::atoll(argv[2]));
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}

}  // namespace ddp_checkpoint_world
