// Peaks of memory beside the pages' formulas, and times of single calls.
#include <chrono>
#include <string>
#include <vector>

#include <c10/cuda/CUDAGuard.h>

#include "census.h"
#include "support/temporary_folder.h"

namespace ddp_cuda_census {

namespace {

using Options = ddp::DistributedDataParallelOptions;
using Wrapper = ddp::DistributedDataParallel<Net>;

constexpr int kLargeLayers = 16;
constexpr int64_t kLargeWidth = 2048;
constexpr double kLayerParameters = kLargeWidth * kLargeWidth + kLargeWidth;
constexpr double kParameters = kLargeLayers * kLayerParameters;
constexpr double kBucketBytes = 25 * 1024.0 * 1024.0;

/// \param bytes  a parameter's, by the pages, with AdamW in float32.
void measure_wrapper(const std::string& name, const Options& options, double bytes) {
  const auto before = allocated_bytes();
  auto net = make_layers(kLargeLayers, kLargeWidth);
  Wrapper model(net, options);
  ddp::optim::AdamW optimizer(net->parameters(), adamw());
  say_memory(name, step_of(model, optimizer, make_input(kLargeWidth)), before, bytes * kParameters);
}

void measure_sharded_optimizer(int stage, double expected) {
  const auto before = allocated_bytes();
  auto net = make_layers(kLargeLayers, kLargeWidth);
  Wrapper model(net, Options().gradient_as_bucket_view(stage == 1));
  ddp::ZeroRedundancyOptimizer<ddp::optim::AdamW> optimizer(
      model, adamw(), ddp::ZeroOptions().stage(stage));
  say_memory(
      "zero" + std::to_string(stage), step_of(model, optimizer, make_input(kLargeWidth)), before,
      expected);
}

void measure_sharded(
    const std::string& name, const ddp::FullyShardedOptions& options, double expected) {
  const auto before = allocated_bytes();
  Net net;
  for (int i = 0; i < kLargeLayers; ++i) {
    torch::nn::Linear layer(kLargeWidth, kLargeWidth);
    layer->to(kGpu);
    net->push_back(ddp::FullyShardedDataParallel<torch::nn::Linear>(layer, options));
  }
  ddp::FullyShardedDataParallel<Net> model(net, options);
  ddp::optim::AdamW optimizer(model->parameters(), adamw());
  say_memory(name, step_of(model, optimizer, make_input(kLargeWidth)), before, expected);
}

void time_optimizers() {
  auto net = make_layers(400, kWidth);
  for (auto& p : net->parameters()) p.mutable_grad() = torch::ones_like(p);
  const auto small = net->parameters();
  ddp::optim::AdamW fused(small, adamw());
  torch::optim::AdamW plain(small, adamw());
  say_time("adamw_800", [&] { fused.step(); });
  say_time("adamw_800_libtorch", [&] { plain.step(); });
  say_time("clip_800", [&] { (void)ddp::clip_grad_norm_(fused, 1e9); });
  say_time("clip_800_libtorch", [&] { (void)torch::nn::utils::clip_grad_norm_(small, 1e9); });
  auto large = torch::ones({int64_t{1} << 28}, kGpu).requires_grad_();
  large.mutable_grad() = torch::ones_like(large);
  ddp::optim::AdamW of_large({large}, adamw());
  say_time("adamw_268M", [&] { of_large.step(); });
}

void time_captured_step() {
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  auto net = make_layers(100, kWidth);
  Wrapper model(net);
  ddp::optim::AdamW optimizer(net->parameters(), adamw());
  const auto input = make_input(kWidth);
  const auto train = [&] {
    optimizer.zero_grad();
    auto loss = model->forward(input).mean();
    loss.backward();
    optimizer.step();
    return loss.detach();
  };
  say_time(
      "step", [&] { (void)train(); }, /*warmup=*/6);
  ddp::CapturedStep captured(train, ddp::CapturedStepOptions().optimizers({&optimizer}));
  say_time(
      "step_captured", [&] { captured(); }, /*warmup=*/6);
}

// Until save() returns and training goes on, of 2 GiB; and the copies alone, through memory that is
// pinned.
void time_save() {
  const ddp::testing::TemporaryFolder folder;
  auto net = make_layers(8, 8192);
  const auto one = net->parameters()[0].detach();
  auto pinned = at::empty(one.sizes(), one.options().device(at::kCPU).pinned_memory(true));
  say_time("copies_2GiB", [&] {
    for (int i = 0; i < 8; ++i) pinned.copy_(one, /*non_blocking=*/true);
  });
  ddp::Checkpointer saver(folder.path());
  saver.add("model", net);
  for (int64_t step = 1; step <= 2; ++step) {  // the first one makes its buffers
    torch::cuda::synchronize();
    const auto begin = std::chrono::steady_clock::now();
    saver.save(step);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    say_ms("save_2GiB_" + std::to_string(step), took.count());
    saver.wait();
  }
}

}  // namespace

void measure_memory() {
  const double ranks = ddp::get_world_size();
  // One rank averages nothing, so it has no buckets.
  const double copied = ranks == 1 ? 16 : 20;
  measure_wrapper("ddp", Options(), copied);
  measure_wrapper("ddp_view", Options().gradient_as_bucket_view(true), 16);
  measure_wrapper("ddp_lazy", Options().lazy_bucket_allocation(true), copied);
  measure_sharded_optimizer(1, (8 + 8 / ranks) * kParameters);
  measure_sharded_optimizer(2, (4 + 12 / ranks) * kParameters + 2 * kBucketBytes);
  const double shards = 16 / ranks * kParameters;
  const double unit = 4 * kLayerParameters;
  measure_sharded("fsdp", ddp::FullyShardedOptions(), shards + unit * (4 + 1 / ranks));
  measure_sharded(
      "fsdp_no_prefetch", ddp::FullyShardedOptions().prefetch(0), shards + unit * (3 + 1 / ranks));
  measure_sharded(
      "fsdp_kept", ddp::FullyShardedOptions().reshard_after_forward(false),
      shards + 4 * kParameters + unit * (2 + 1 / ranks));
}

void measure_times() {
  time_optimizers();
  time_captured_step();
  time_save();
}

}  // namespace ddp_cuda_census
