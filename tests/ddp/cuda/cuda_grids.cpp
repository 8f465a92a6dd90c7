// Four ranks in a grid of 2 x 2, each beside one process with the whole model and all batches.
#include <string>
#include <vector>

#include "cuda_world.h"
#include "support/compare.h"

namespace ddp_cuda_world {

namespace {

constexpr int64_t kWidth = 16, kInner = 32, kRows = 8;
constexpr double kRate = 0.1;

/// Two linear layers, from here on the whole ones: weight, bias, weight, bias.
std::vector<at::Tensor> whole_weights(uint64_t seed) {
  std::vector<at::Tensor> weights{
      drawn({kInner, kWidth}, seed), drawn({kInner}, seed + 1), drawn({kWidth, kInner}, seed + 2),
      drawn({kWidth}, seed + 3)};
  for (auto& t : weights) t = (t * 0.3).requires_grad_();
  return weights;
}

at::Tensor whole_forward(const std::vector<at::Tensor>& weights, const at::Tensor& x) {
  return x + torch::linear(
                 torch::gelu(torch::linear(x, weights[0], weights[1])), weights[2], weights[3]);
}

/// The same, cut over `tp`.
struct CutImpl : torch::nn::Module {
  CutImpl(const std::vector<at::Tensor>& whole, const ddp::GroupArg& tp)
      : up(register_module(
            "up", ddp::ColumnParallelLinear(
                      ddp::ColumnParallelLinearOptions(kWidth, kInner).process_group(tp),
                      whole[0].detach(), whole[1].detach()))),
        down(register_module(
            "down", ddp::RowParallelLinear(
                        ddp::RowParallelLinearOptions(kInner, kWidth).process_group(tp),
                        whole[2].detach(), whole[3].detach()))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down->forward(torch::gelu(up->forward(x))); }
  ddp::ColumnParallelLinear up;
  ddp::RowParallelLinear down;
};
TORCH_MODULE(Cut);

/// The same, whole.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const std::vector<at::Tensor>& whole) {
    to(kGpu);
    const torch::NoGradGuard no_grad;
    size_t k = 0;
    for (auto& p : parameters()) p.copy_(whole[k++]);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down->forward(torch::gelu(up->forward(x))); }
  torch::nn::Linear up{register_module("up", torch::nn::Linear(kWidth, kInner))};
  torch::nn::Linear down{register_module("down", torch::nn::Linear(kInner, kWidth))};
};
TORCH_MODULE(Block);

ddp::DeviceMesh mesh_of(const std::string& first, const std::string& second) {
  TORCH_CHECK(
      ddp::get_world_size() == 4, "grids: expected 4 ranks, got ", ddp::get_world_size(), ".");
  return ddp::init_device_mesh({2, 2}, {first, second}, group);
}

at::Tensor batch_at(int step, int64_t replica) {
  return drawn(
      {kRows, kWidth},
      1000 + 10 * static_cast<uint64_t>(step + 1) + static_cast<uint64_t>(replica));
}

at::Tensor mean_square(const at::Tensor& y) { return y.pow(2).mean(); }

/// Trains `blocks` in this process, on the batches of `replicas`.
std::vector<std::vector<at::Tensor>> trained(int blocks, int64_t replicas) {
  std::vector<std::vector<at::Tensor>> all;
  std::vector<at::Tensor> parameters;
  for (int block = 0; block < blocks; ++block) {
    all.push_back(whole_weights(10 * static_cast<uint64_t>(block + 1)));
    parameters.insert(parameters.end(), all.back().begin(), all.back().end());
  }
  torch::optim::SGD optimizer(parameters, kRate);
  for (int step = 0; step < kSteps; ++step) {
    std::vector<at::Tensor> batches;
    for (int64_t replica = 0; replica < replicas; ++replica)
      batches.push_back(batch_at(step, replica));
    auto x = torch::cat(batches);
    for (const auto& weights : all) x = whole_forward(weights, x);
    optimizer.zero_grad();
    mean_square(x).backward();
    optimizer.step();
  }
  return all;
}

void check_block(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  TORCH_CHECK(got.size() == expected.size(), "parameters: ", got.size());
  for (size_t i = 0; i < got.size(); ++i)
    check_near("parameter " + std::to_string(i), got[i].detach(), expected[i].detach());
}

void shard_and_replicate() {
  const auto mesh = mesh_of("replicate", "shard");
  const auto options = ddp::FullyShardedOptions().mesh(mesh);
  ddp::FullyShardedDataParallel first(Block(whole_weights(10)), options);
  ddp::FullyShardedDataParallel second(Block(whole_weights(20)), options);
  torch::nn::Sequential net(first, second);
  ddp::FullyShardedDataParallel model(net, options);
  torch::optim::SGD optimizer(model->parameters(), kRate);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    mean_square(model->forward(batch_at(step, ddp::get_rank(group)))).backward();
    optimizer.step();
  }
  const auto expected = trained(/*blocks=*/2, /*replicas=*/4);
  const ddp::SummonFullParams whole(*model);
  check_block(first->parameters(), expected[0]);
  check_block(second->parameters(), expected[1]);
}

void replicate_cut_layers() {
  const auto mesh = mesh_of("dp", "tp");
  Cut net(whole_weights(10), mesh.group("tp"));
  ddp::DistributedDataParallel model(net, Options().process_group(mesh.group("dp")));
  torch::optim::SGD optimizer(net->parameters(), kRate);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    mean_square(model->forward(batch_at(step, mesh.rank("dp")))).backward();
    optimizer.step();
  }
  const auto expected = trained(/*blocks=*/1, /*replicas=*/2)[0];
  const auto part = static_cast<size_t>(mesh.rank("tp"));
  check_near("the column layer", net->up->weight.detach(), expected[0].detach().chunk(2, 0)[part]);
  check_near("the row layer", net->down->weight.detach(), expected[2].detach().chunk(2, 1)[part]);
  check_near("the row layer's bias", net->down->bias.detach(), expected[3].detach());
}

void pipe_shards() {
  const auto mesh = mesh_of("pp", "dp");
  const int stage_index = static_cast<int>(mesh.rank("pp"));
  const auto options = ddp::FullyShardedOptions().process_group(mesh.group("dp"));
  ddp::FullyShardedDataParallel unit(
      Block(whole_weights(10 * static_cast<uint64_t>(stage_index + 1))), options);
  const auto loss = [](const at::Tensor& y, const at::Tensor&) { return mean_square(y); };
  ddp::PipelineStage stage(
      unit, loss, ddp::PipelineOptions().process_group(mesh.group("pp")).microbatches(4));
  torch::optim::SGD optimizer(stage.parameters(), kRate);
  for (int step = 0; step < kSteps; ++step) {
    const auto x = batch_at(step, mesh.rank("dp"));
    optimizer.zero_grad();
    stage.step(
        stage_index == 0 ? std::vector<at::Tensor>{x} : std::vector<at::Tensor>{},
        stage_index == 1 ? x : at::Tensor());
    optimizer.step();
  }
  const auto expected = trained(/*blocks=*/2, /*replicas=*/2);
  const ddp::SummonFullParams whole(*unit);
  check_block(unit->parameters(), expected[static_cast<size_t>(stage_index)]);
}

}  // namespace

std::vector<Case> grids_of_four() {
  return {
      {"shards in replicas", shard_and_replicate},
      {"cut layers in replicas", replicate_cut_layers},
      {"shards in a pipeline", pipe_shards}};
}

}  // namespace ddp_cuda_world
