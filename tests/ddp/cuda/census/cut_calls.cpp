// The calls of steps of models that are cut over the ranks.
#include <string>
#include <utility>
#include <vector>

#include "census.h"

namespace ddp_cuda_census {

namespace {

using ShardedOptions = ddp::FullyShardedOptions;
using Unit = ddp::FullyShardedDataParallel<torch::nn::Linear>;
using Sharded = ddp::FullyShardedDataParallel<Net>;

constexpr int kUnits = 8;
constexpr int64_t kUnitWidth = 256;

Sharded make_sharded(const ShardedOptions& options) {
  torch::manual_seed(1);
  Net net;
  for (int i = 0; i < kUnits; ++i) {
    torch::nn::Linear layer(kUnitWidth, kUnitWidth);
    layer->to(kGpu);
    net->push_back(Unit(layer, options));
  }
  return Sharded(net, options);
}

void count_sharded(const std::string& name, const ShardedOptions& options) {
  auto model = make_sharded(options);
  ddp::optim::AdamW optimizer(model->parameters(), adamw());
  count_calls(name, step_of(model, optimizer, make_input(kUnitWidth)));
}

void count_sharded_clipping() {
  auto model = make_sharded(ShardedOptions());
  ddp::optim::AdamW optimizer(model->parameters(), adamw());
  const auto input = make_input(kUnitWidth);
  count_calls("fsdp_clip", [&] {
    optimizer.zero_grad();
    model->forward(input).mean().backward();
    (void)ddp::clip_grad_norm_(*model, 1.0);
    optimizer.step();
  });
}

void count_tensor_parallel() {
  ddp::ColumnParallelLinear up(ddp::ColumnParallelLinearOptions(kUnitWidth, 4 * kUnitWidth));
  ddp::RowParallelLinear down(ddp::RowParallelLinearOptions(4 * kUnitWidth, kUnitWidth));
  up->to(kGpu);
  down->to(kGpu);
  auto parameters = up->parameters();
  for (const auto& p : down->parameters()) parameters.push_back(p);
  ddp::optim::AdamW optimizer(parameters, adamw());
  const auto input = make_input(kUnitWidth).requires_grad_();
  count_calls("tensor_parallel", [&] {
    optimizer.zero_grad();
    down->forward(torch::gelu(up->forward(input))).mean().backward();
    optimizer.step();
  });
}

void count_pipeline(const std::string& name, ddp::PipelineSchedule schedule) {
  const int ranks = ddp::get_world_size(), rank = ddp::get_rank();
  torch::nn::Linear layer(kUnitWidth, kUnitWidth);
  layer->to(kGpu);
  const auto loss = [](const at::Tensor& y, const at::Tensor& target) {
    return (y - target).pow(2).mean();
  };
  ddp::PipelineStage stage(
      layer, rank, ranks, loss, ddp::PipelineOptions().schedule(schedule).microbatches(8));
  ddp::optim::AdamW optimizer(stage.parameters(), adamw());
  const auto x = torch::ones({64, kUnitWidth}, kGpu);
  count_calls(name, [&] {
    optimizer.zero_grad();
    stage.step(
        rank == 0 ? std::vector<at::Tensor>{x} : std::vector<at::Tensor>{},
        rank + 1 == ranks ? x : at::Tensor());
    optimizer.step();
  });
}

}  // namespace

void count_cut_calls() {
  count_sharded("fsdp", ShardedOptions());
  count_sharded("fsdp_kept", ShardedOptions().reshard_after_forward(false));
  count_sharded("fsdp_no_prefetch", ShardedOptions().prefetch(0));
  count_sharded(
      "fsdp_bfloat16",
      ShardedOptions().mp_policy(
          ddp::MixedPrecisionPolicy().param_dtype(at::kBFloat16).reduce_dtype(at::kFloat)));
  count_sharded_clipping();
  count_tensor_parallel();
  if (ddp::get_world_size() == 1) return;
  count_pipeline("gpipe", ddp::PipelineSchedule::GPipe);
  count_pipeline("1f1b", ddp::PipelineSchedule::OneFOneB);
}

}  // namespace ddp_cuda_census
