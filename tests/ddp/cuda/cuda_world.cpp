// Ranks that share one GPU, as processes: cuda_world BACKEND CASES, where CASES is "averages",
// "parts", "models" or, for four ranks, "grids". Prints each failure; rank 0 prints "ok" where
// there is none.
//
// A rank's model is compared with that of one process, which each rank computes itself from all
// ranks' batches.
#include <cstdio>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAGuard.h>
#include <ddp/ddp.h>
#include <torch/torch.h>

#include "cuda_world.h"

namespace ddp_cuda_world {

namespace {

/// Trains with this rank's batches.
template <typename Model, typename Optimizer>
void run_steps(Model& model, Optimizer& optimizer) {
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    loss_of(model->forward(own_batch(step))).backward();
    optimizer.step();
  }
}

/// Trains `module`, which has the parameters of `net`, beside one process with all batches.
template <typename Module>
void train_beside_one_process(
    const Module& module, const Net& net, const Options& options,
    const ddp::CommHook& hook = nullptr, double tolerance = 1e-5) {
  ddp::DistributedDataParallel model(module, options);
  if (hook) model->register_comm_hook(hook);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  run_steps(model, optimizer);
  check(net, one_process(), tolerance);
}

void train(const Options& options, const ddp::CommHook& hook = nullptr, double tolerance = 1e-5) {
  const auto net = make_net();
  train_beside_one_process(net, net, options, hook, tolerance);
}

void accumulate() {
  auto net = make_net();
  ddp::DistributedDataParallel model(net, in_group());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto halves = own_batch(step).chunk(2);
    {
      const auto guard = model->no_sync();
      (loss_of(model->forward(halves[0])) / 2).backward();
    }
    (loss_of(model->forward(halves[1])) / 2).backward();
    optimizer.step();
  }
  check(net, one_process());
}

void on_a_side_stream() {
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  train(in_group().bucket_cap_mb(1e-3));
}

struct SkippingImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x, bool skip) {
    const auto y = first(x);
    return skip ? y : y + second(x);
  }
  torch::nn::Linear first{register_module("first", torch::nn::Linear(20, 5))};
  torch::nn::Linear second{register_module("second", torch::nn::Linear(20, 5))};
};
TORCH_MODULE(Skipping);

void skip_parameters() {
  Skipping net;
  net->to(kGpu);
  ddp::DistributedDataParallel model(net, in_group().find_unused_parameters(true));
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    // Skips on one rank, on all, on none.
    const bool skip = step % 3 == 0 ? ddp::get_rank() == 0 : step % 3 == 1;
    const bool all_skip = step % 3 == 1 || (step % 3 == 0 && ddp::get_world_size() == 1);
    loss_of(model->forward(own_batch(step), skip)).backward();
    TORCH_CHECK(
        net->second->weight.grad().defined() != all_skip, "step ", step,
        ": a gradient where no rank has one, or none where some have");
    optimizer.step();
  }
  TORCH_CHECK(ddp::replicas_equal(*net, group), "the ranks' models differ");
}

void share_buffers() {
  auto net = make_net(/*normalizes=*/true);
  ddp::DistributedDataParallel model(net, in_group());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  run_steps(model, optimizer);
  TORCH_CHECK(ddp::replicas_equal(*net, group), "the ranks' parameters or buffers differ");
  TORCH_CHECK(flat(net).isfinite().all().item<bool>(), "parameters are not finite");
}

void sync_batch_norm() {
  auto net = make_net(/*normalizes=*/true);
  TORCH_CHECK(ddp::convert_sync_batchnorm(net, group) == 1);
  ddp::DistributedDataParallel model(net, in_group());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  run_steps(model, optimizer);
  auto whole = make_net(/*normalizes=*/true);
  check(net, one_process(whole, torch::optim::SGD(whole->parameters(), 0.1)), 1e-4);
  const auto statistics = [](const Net& of) {
    return torch::stack(
        {of->named_buffers()["1.running_mean"], of->named_buffers()["1.running_var"]});
  };
  const auto off = (statistics(net) - statistics(whole)).abs().max().item<double>();
  TORCH_CHECK(off < 1e-4, "running statistics are off by ", off);
}

void shard_optimizer(int stage) {
  const torch::optim::AdamOptions adam(1e-2);
  auto net = make_net();
  ddp::DistributedDataParallel model(net, in_group().bucket_cap_mb(1e-3));  // several buckets
  ddp::ZeroRedundancyOptimizer<torch::optim::Adam> optimizer(
      model, adam, ddp::ZeroOptions().stage(stage));
  run_steps(model, optimizer);
  auto whole = make_net();
  check(net, one_process(whole, torch::optim::Adam(whole->parameters(), adam)), 1e-3);
}

void mix_precision() {
  const auto low = ddp::MixedPrecision().param_dtype(at::kBFloat16).reduce_dtype(at::kBFloat16);
  train(in_group().mixed_precision(low), nullptr, 0.02);
}

void scale_gradients() {
  auto net = make_net();
  ddp::DistributedDataParallel model(net, in_group());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  ddp::GradScaler scaler;
  int skipped = 0;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    at::Tensor output;
    {
      const ddp::AutocastGuard guard(at::kCUDA);
      output = model->forward(own_batch(step));
      TORCH_CHECK(output.scalar_type() == at::kHalf, "autocast gave ", output.scalar_type());
    }
    auto loss = loss_of(output);
    // An infinity on one rank makes all ranks skip the step.
    if (step == 2 && ddp::get_rank() == 0) loss = loss * std::numeric_limits<float>::infinity();
    scaler.scale(loss).backward();
    skipped += scaler.step(optimizer) ? 0 : 1;
    scaler.update();
  }
  TORCH_CHECK(skipped >= 1, "no step was skipped");
  TORCH_CHECK(ddp::replicas_equal(*net, group), "the ranks' models differ");
}

// Rank r has 2 + 3 r batches. The last rank's model is the one of all.
void join_uneven_inputs() {
  auto net = make_net();
  ddp::DistributedDataParallel model(net, in_group());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  ddp::join({model.get()}, [&] {
    for (int step = 0; step < 2 + 3 * ddp::get_rank(); ++step) {
      optimizer.zero_grad();
      loss_of(model->forward(own_batch(step))).backward();
      optimizer.step();
    }
  });
  TORCH_CHECK(ddp::replicas_equal(*net, group), "the ranks' models differ");
}

void average_models() {
  auto net = make_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  ddp::PeriodicModelAverager averager(2, 0, group);
  for (int step = 0; step < kSteps; ++step) {  // averages after each second one, and the last
    optimizer.zero_grad();
    loss_of(net->forward(own_batch(step))).backward();
    optimizer.step();
    averager.average_parameters(net->parameters());
  }
  TORCH_CHECK(ddp::replicas_equal(*net, group), "the ranks' models differ");
}

// One region, whose ranks share the differences over the group.
void average_regions() {
  auto net = make_net();
  ddp::DistributedDataParallel model(net, in_group());
  ddp::PostLocalSGDOptimizer optimizer(
      std::make_shared<torch::optim::SGD>(net->parameters(), 0.1),
      std::make_shared<ddp::DiLoCo>(
          net->parameters(),
          ddp::DiLoCoOptions().sync_every(2).outer_lr(1).outer_momentum(0).local(group)));
  run_steps(model, optimizer);
  check(net, one_process(), 1e-2);  // differences travel in bfloat16
}

void step_in_backward() {
  const torch::optim::AdamWOptions adam(1e-2);
  auto net = make_net();
  ddp::DistributedDataParallel model(net, in_group().bucket_cap_mb(1e-3));
  model->step_in_backward(std::make_shared<ddp::optim::AdamW>(net->parameters(), adam));
  for (int step = 0; step < kSteps; ++step) {
    net->zero_grad();
    loss_of(model->forward(own_batch(step))).backward();
  }
  auto whole = make_net();
  check(net, one_process(whole, torch::optim::AdamW(whole->parameters(), adam)), 1e-3);
}

struct RecomputedImpl : torch::nn::Module {
  explicit RecomputedImpl(Net whole) : net(register_module("net", std::move(whole))) {}
  at::Tensor forward(const at::Tensor& x) { return ddp::checkpoint(net, x); }
  Net net;
};
TORCH_MODULE(Recomputed);

void recompute_activations() {
  auto net = make_net();
  train_beside_one_process(Recomputed(net), net, in_group());
}

void save_activations_on_host() {
  const ddp::save_on_host guard;
  train(in_group());
  TORCH_CHECK(guard.stats().copied > 0, "nothing was saved on the host");
}

void compress_gradients() {
  ddp::hooks::PowerSGD power_sgd(
      ddp::hooks::PowerSGDOptions().matrix_approximation_rank(2).start_iter(2), group);
  train(in_group().bucket_cap_mb(1e-3), power_sgd, 0.2);
  TORCH_CHECK(power_sgd.stats().rate() > 1, "nothing was compressed");
}

// TopK of all elements is the average.
void send_largest() {
  train(
      in_group().bucket_cap_mb(1e-3), ddp::hooks::top_k(ddp::hooks::TopKOptions().ratio(1), group));
}

void take_times() {
  auto net = make_net();
  ddp::DistributedDataParallel model(net, in_group().stats_every(1).bucket_cap_mb(1e-3));
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  run_steps(model, optimizer);
  torch::cuda::synchronize();
  const auto stats = model->stats();
  TORCH_CHECK(stats.steps.size() == kSteps, "times of ", stats.steps.size(), " steps");
  for (const auto& step : stats.steps) {
    TORCH_CHECK(
        0 < step.forward_ms && step.forward_ms < step.compute_ms && step.compute_ms < step.total_ms,
        "step ", step.step, ": ", step.forward_ms, ", ", step.compute_ms, ", ", step.total_ms);
    for (const auto& bucket : step.buckets) {
      TORCH_CHECK(
          bucket.ready_ms <= bucket.launched_ms && bucket.launched_ms <= bucket.done_ms &&
              bucket.done_ms <= step.total_ms,
          "step ", step.step, ": ", bucket.ready_ms, ", ", bucket.launched_ms, ", ", bucket.done_ms,
          " of ", step.total_ms);
    }
  }
}

// Waits on another stream than the one that starts it, and gets the memory of the copy that was
// sent.
void wait_on_another_stream() {
  constexpr int64_t kRows = 1024;
  constexpr int64_t kTensOfMilliseconds = 50'000'000;
  const auto starts = c10::cuda::getStreamFromPool(), waits = c10::cuda::getStreamFromPool();
  auto x = torch::arange(kRows * kRows, torch::kLong).view({kRows, kRows}).to(kGpu);
  const auto expected = x * ddp::get_world_size();
  torch::cuda::synchronize();
  auto turned = x.t();
  {
    const c10::cuda::CUDAStreamGuard guard(starts);
    auto work = ddp::all_reduce_async(turned, c10d::ReduceOp::SUM, group);
    const c10::cuda::CUDAStreamGuard other(waits);
    at::cuda::sleep(kTensOfMilliseconds);
    work->wait();
  }
  {
    const c10::cuda::CUDAStreamGuard guard(starts);
    for (int i = 0; i < 4; ++i)
      torch::full({kRows, kRows}, -1, at::dtype(torch::kLong).device(kGpu));
  }
  torch::cuda::synchronize();
  TORCH_CHECK(torch::equal(x, expected), "the copy's memory was used by another stream");
}

std::vector<Case> averages() {
  return {
      {"copied gradients", [] { train(in_group()); }},
      {"gradients as views", [] { train(in_group().gradient_as_bucket_view(true)); }},
      {"many buckets", [] { train(in_group().bucket_cap_mb(1e-3)); }},
      {"static graph", [] { train(in_group().static_graph(true)); }},
      {"input from the CPU", [] { train(in_group().device_ids({kGpu})); }},
      {"a side stream", on_a_side_stream},
      {"another stream waits", wait_on_another_stream},
      {"times", take_times},
      {"accumulation", accumulate},
      {"unused parameters", skip_parameters},
      {"buffers", share_buffers}};
}

std::vector<Case> parts() {
  return {
      {"activations on the host", save_activations_on_host},  // first what no GPU has seen
      {"PowerSGD", compress_gradients},
      {"the largest elements", send_largest},
      {"ZeRO of stage 2", [] { shard_optimizer(2); }},
      {"mixed precision", mix_precision},
      {"autocast and GradScaler", scale_gradients},
      {"SyncBatchNorm", sync_batch_norm},
      {"ZeRO of stage 1", [] { shard_optimizer(1); }},
      {"uneven inputs", join_uneven_inputs},
      {"averaged models", average_models},
      {"a region of DiLoCo", average_regions},
      {"steps in backward", step_in_backward},
      {"activations computed again", recompute_activations},
      {"half precision hook", [] { train(in_group(), ddp::hooks::fp16_compress(group), 1e-2); }}};
}

/// \return  the number of failed cases.
int run(const std::vector<Case>& cases) {
  std::vector<int> ranks(static_cast<size_t>(ddp::get_world_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<ddp::ProcessGroup> groups;
  for (size_t i = 0; i < cases.size(); ++i) groups.push_back(ddp::new_group(ranks));
  int failed = 0;
  for (const auto& [name, body] : cases) {
    group = groups.back();
    groups.pop_back();
    try {
      body();
    } catch (const c10::Error& error) {
      std::printf("failed: %s: %s\n", name.c_str(), error.what_without_backtrace());
      std::fflush(stdout);
      ++failed;
    }
  }
  group = {};
  return failed;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: cuda_world BACKEND averages|parts|models|grids\n");
    return 2;
  }
  if (!torch::cuda::is_available()) {
    std::printf("skipped: no CUDA device\n");
    return 0;
  }
  try {
    ddp::init_process_group(ddp::ProcessGroupOptions().backend(argv[1]));
    const std::string cases = argv[2];
    const auto failed =
        run(cases == "parts"    ? parts()
            : cases == "models" ? cut_models()
            : cases == "grids"  ? grids_of_four()
                                : averages());
    if (failed == 0 && ddp::get_rank() == 0) std::printf("ok\n");
    ddp::destroy_process_group();
    return failed == 0 ? 0 : 1;
  } catch (const c10::Error& error) {
    std::printf("failed: %s\n", error.what_without_backtrace());
    return 1;
  }
}

}  // namespace ddp_cuda_world
