// The host's CUDA calls in a training step on a GPU, as LibTorch's profiler (CUPTI) records them.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ddp/profiler.h>
#include <torch/torch.h>

#include "ddp/cuda_training.h"
#include "ddp/trace_events.h"
#include "support/cuda.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace ddp::testing;

constexpr const char* kRange = "from forward to step";

/// The calls of the CUDA runtime and driver in three steps.
std::vector<TraceEvent> calls_of_steps(CudaTrainer& trainer, bool waits) {
  const TemporaryFolder folder;
  const auto path = folder.path() + "/trace.json";
  const auto x = cuda_batch(0);
  for (int step = 0; step < 5; ++step) trainer.step(x);
  torch::cuda::synchronize();
  Profiler profiler;
  {
    const RecordFunctionGuard range(kRange);
    for (int step = 0; step < 3; ++step) {
      const auto loss = trainer.step(x);
      if (waits) (void)loss.item<float>();
    }
  }
  profiler.stop();
  profiler.export_chrome_trace(path);
  return within(read_trace(path), kRange, {"cuda_runtime", "cuda_driver"});
}

bool any_names(const std::vector<TraceEvent>& calls, const std::string& part) {
  return std::any_of(calls.begin(), calls.end(), [&](const TraceEvent& call) {
    return call.name.find(part) != std::string::npos;
  });
}

}  // namespace

TEST_CASE("the trace reader finds the events within a range", "[trace]") {
  const TemporaryFolder folder;
  const auto path = folder.path() + "/trace.json";
  Profiler profiler;
  (void)torch::ones({3}).exp();
  {
    const RecordFunctionGuard range(kRange);
    (void)torch::ones({3}).sum();
  }
  profiler.stop();
  profiler.export_chrome_trace(path);
  const auto inside = within(read_trace(path), kRange, {"cpu_op"});
  CHECK(any_names(inside, "aten::sum"));
  CHECK_FALSE(any_names(inside, "aten::exp"));
}

TEST_CASE("the profiler records no wait of the host in a step", "[cuda][profile]") {
  if (lacks_cuda()) return;
  const bool waits = GENERATE(false, true);
  CAPTURE(waits);
  const auto calls = run_ranks<std::vector<TraceEvent>>(1, over("nccl"), [&](const Rank& self) {
    CudaTrainer trainer(self);
    return calls_of_steps(trainer, waits);
  });
  INFO("without launches CUPTI recorded nothing, and the rest says nothing");
  REQUIRE(any_names(calls[0], "LaunchKernel"));
  CHECK(any_names(calls[0], "Synchronize") == waits);
}

TEST_CASE("parameters in low precision take few kernels", "[cuda][profile]") {
  if (lacks_cuda()) return;
  constexpr int kLayers = 40;
  const auto launches = run_ranks<std::vector<int64_t>>(1, over("nccl"), [](const Rank& self) {
    torch::nn::Sequential net, low;
    for (auto* layers : {&net, &low}) {
      for (int i = 0; i < kLayers; ++i) (*layers)->push_back(torch::nn::Linear(64, 64));
      (*layers)->to(c10::Device(at::kCUDA, 0));
    }
    low->to(torch::kBFloat16);
    DistributedDataParallel<torch::nn::Sequential> model(
        net, DistributedDataParallelOptions()
                 .process_group(self.group)
                 .mixed_precision(MixedPrecision().param_dtype(torch::kBFloat16)));
    const auto x = torch::ones({8, 64}, c10::Device(at::kCUDA, 0));
    const auto launches_of = [](const std::function<void()>& forward) {
      const TemporaryFolder folder;
      const auto path = folder.path() + "/trace.json";
      forward();
      torch::cuda::synchronize();
      Profiler profiler;
      {
        const RecordFunctionGuard range(kRange);
        forward();
      }
      profiler.stop();
      profiler.export_chrome_trace(path);
      const auto calls = within(read_trace(path), kRange, {"cuda_runtime", "cuda_driver"});
      return std::count_if(calls.begin(), calls.end(), [](const TraceEvent& call) {
        return call.name.find("LaunchKernel") != std::string::npos;
      });
    };
    return std::vector<int64_t>{
        launches_of([&] { low->forward(x.to(torch::kBFloat16)); }),
        launches_of([&] { model->forward(x); })};
  });
  CAPTURE(launches[0][0], launches[0][1]);
  CHECK(launches[0][0] >= kLayers);
  CHECK(launches[0][1] - launches[0][0] < kLayers / 2);  // one cast at a time: 2 * kLayers
}

}  // namespace ddp
