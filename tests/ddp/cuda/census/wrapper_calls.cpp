// The calls of steps of whole models: each mode has its name in Python's census, too
// (benchmarks/peers/cuda_census.py).
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include <c10/cuda/CUDAGuard.h>

#include "census.h"
#include "support/temporary_folder.h"

namespace ddp_cuda_census {

namespace {

using Options = ddp::DistributedDataParallelOptions;
using Wrapper = ddp::DistributedDataParallel<Net>;

void count_plain() {
  for (const bool normalizes : {false, true}) {
    auto net = make_layers(kLayers, kWidth, normalizes);
    ddp::optim::AdamW optimizer(net->parameters(), adamw());
    count_calls(
        normalizes ? "none_batch_norm" : "none", step_of(net, optimizer, make_input(kWidth)));
  }
}

void count_wrapper(const std::string& name, const Options& options, bool with_hook = false) {
  auto net = make_layers(kLayers, kWidth);
  Wrapper model(net, options);
  if (with_hook) model->register_comm_hook(ddp::hooks::all_reduce());
  ddp::optim::AdamW optimizer(net->parameters(), adamw());
  count_calls(name, step_of(model, optimizer, make_input(kWidth)));
}

void count_sharded_optimizer(int stage) {
  auto net = make_layers(kLayers, kWidth);
  Wrapper model(net);
  ddp::ZeroRedundancyOptimizer<ddp::optim::AdamW> optimizer(
      model, adamw(), ddp::ZeroOptions().stage(stage));
  count_calls("zero" + std::to_string(stage), step_of(model, optimizer, make_input(kWidth)));
}

void count_clipping() {
  auto net = make_layers(kLayers, kWidth);
  Wrapper model(net);
  ddp::optim::AdamW optimizer(net->parameters(), adamw());
  const auto input = make_input(kWidth);
  count_calls("clip", [&] {
    optimizer.zero_grad();
    model->forward(input).mean().backward();
    (void)ddp::clip_grad_norm_(optimizer, 1.0);
    optimizer.step();
  });
}

void count_sync_batch_norm() {
  auto net = make_layers(kLayers, kWidth, /*normalizes=*/true);
  ddp::convert_sync_batchnorm(net);
  Wrapper model(net);
  ddp::optim::AdamW optimizer(net->parameters(), adamw());
  count_calls("sync_batch_norm", step_of(model, optimizer, make_input(kWidth)));
}

void count_captured() {
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  auto net = make_layers(kLayers, kWidth);
  Wrapper model(net);
  ddp::optim::AdamW optimizer(net->parameters(), adamw());
  const auto input = make_input(kWidth);
  ddp::CapturedStep step(
      [&] {
        optimizer.zero_grad();
        auto loss = model->forward(input).mean();
        loss.backward();
        optimizer.step();
        return loss.detach();
      },
      ddp::CapturedStepOptions().optimizers({&optimizer}));
  count_calls("captured", [&] { step(); });
}

// The ranks share a folder: they are of one host, whatever NCCL is told.
void count_save() {
  const char* port = std::getenv("MASTER_PORT");
  const auto folder =
      ddp::testing::temporary_base() + "/ddp_cuda_census_" + (port != nullptr ? port : "alone");
  {
    auto net = make_layers(kLayers, kWidth);
    Wrapper model(net);
    ddp::Checkpointer saver(folder);
    saver.add("model", model);
    int64_t step = 0;
    count_calls("save", [&] { saver.save(++step); });
    saver.wait();
  }
  ddp::barrier();
  if (ddp::get_rank() == 0) ddp::testing::remove_all(folder);
}

}  // namespace

void count_wrapper_calls() {
  count_plain();
  count_wrapper("ddp", Options());
  count_wrapper("ddp_view", Options().gradient_as_bucket_view(true));
  count_wrapper("ddp_buckets", Options().bucket_cap_mb(0.05));
  count_wrapper("ddp_unused", Options().find_unused_parameters(true));
  count_wrapper("ddp_hook", Options(), /*with_hook=*/true);
  count_sharded_optimizer(1);
  count_sharded_optimizer(2);
  count_clipping();
  count_sync_batch_norm();
  count_captured();
  count_save();
}

}  // namespace ddp_cuda_census
