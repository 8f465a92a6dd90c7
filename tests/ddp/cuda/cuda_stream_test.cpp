// The streams and the order of the work of a step. A kernel that spins delays a stream, so that
// work which fails to wait for it reads values that are not written yet.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ddp/comm_hooks.h>
#include <torch/torch.h>

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAGuard.h>

#include "ddp/cuda_training.h"
#include "ddp/host_waits.h"
#include "support/cuda.h"
#include "support/nets.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace ddp::testing;
using c10::cuda::CUDAStreamGuard;
using c10::cuda::getStreamFromPool;
using Options = DistributedDataParallelOptions;

constexpr int64_t kTensOfMilliseconds = 50'000'000;  // in clock cycles of a GPU
constexpr int64_t kHalfASecond = 1'000'000'000;

/// Whether buckets are reduced: a group of one reduces nothing, but a hook gets the buckets, and
/// NCCL has a stream of its own.
enum class Buckets { Unused, Reduced };

CommHook hook_for(Buckets buckets, const Rank& self) {
  return buckets == Buckets::Reduced ? hooks::all_reduce(self.group) : nullptr;
}

/// Delays the backward pass of `output` on the device, and with it the first gradients.
at::Tensor late(const at::Tensor& output) {
  output.register_hook([](const at::Tensor& gradient) {
    at::cuda::sleep(kTensOfMilliseconds);
    return gradient * 1;
  });
  return output;
}

at::Tensor late_step(CudaTrainer& trainer, const at::Tensor& x) {
  trainer.optimizer.zero_grad();
  at::cuda::sleep(kTensOfMilliseconds);
  const auto loss = late(trainer.model->forward(x)).pow(2).mean();
  loss.backward();
  trainer.optimizer.step();
  return loss;
}

/// Two parallel layers on streams of their own, whose gradients share a bucket.
struct BesideImpl : torch::nn::Module {
  BesideImpl() {
    draw_normal(*this, 0.1);
    to(c10::Device(at::kCUDA, 0));
  }

  at::Tensor forward(const at::Tensor& x) {
    if (!apart) return left(x) + right(x);
    const auto home = c10::cuda::getCurrentCUDAStream();
    const auto on = [&](const c10::cuda::CUDAStream& stream, torch::nn::Linear& layer, bool slow) {
      at::cuda::CUDAEvent begun, done;
      begun.record(home);
      begun.block(stream);
      at::Tensor y;
      {
        const CUDAStreamGuard guard(stream);
        if (slow) at::cuda::sleep(kTensOfMilliseconds);
        y = layer(x);
        if (slow) y = late(y);
      }
      done.record(stream);
      done.block(home);
      y.record_stream(home);  // which reads it after forward has dropped it
      return y;
    };
    return on(streams[0], left, false) + on(streams[1], right, true);
  }

  bool apart = false;
  std::vector<c10::cuda::CUDAStream> streams{getStreamFromPool(), getStreamFromPool()};
  torch::nn::Linear left{register_module("left", torch::nn::Linear(64, 8))};
  torch::nn::Linear right{register_module("right", torch::nn::Linear(64, 8))};
};
TORCH_MODULE(Beside);

at::Tensor train_beside(bool apart, const Rank* self) {
  Beside net;
  net->apart = apart;
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  std::optional<DistributedDataParallel<Beside>> model;
  if (self != nullptr) {
    model.emplace(net, Options().process_group(self->group));
    (*model)->register_comm_hook(hooks::all_reduce(self->group));
  }
  for (int step = 0; step < 4; ++step) {
    const auto x = cuda_batch(step);
    model ? train_step(*model, optimizer, x) : train_step(net, optimizer, x);
  }
  return flattened(net->parameters()).cpu();
}

}  // namespace

TEST_CASE("a step is ordered correctly on any stream", "[cuda][streams]") {
  if (lacks_cuda()) return;
  const bool as_views = GENERATE(false, true);
  const auto buckets = GENERATE(Buckets::Unused, Buckets::Reduced);
  const auto [made_on_side, on_side] =
      GENERATE(std::pair(false, false), std::pair(false, true), std::pair(true, true));
  const double cap_mb = GENERATE(1e-3, 25.0);
  CAPTURE(as_views, buckets == Buckets::Reduced, on_side, cap_mb);
  const bool made_there = made_on_side;  // a lambda cannot capture the original
  const bool runs_there = on_side;
  constexpr int kSteps = 4;
  const auto trained = run_ranks<at::Tensor>(1, over("nccl"), [&](const Rank& self) {
    const auto home = c10::cuda::getCurrentCUDAStream();
    const auto stream = runs_there ? getStreamFromPool() : home;
    std::vector<at::Tensor> batches;
    for (int step = 0; step < kSteps; ++step) batches.push_back(cuda_batch(step));
    torch::cuda::synchronize();
    std::optional<CudaTrainer> trainer;
    const auto options = Options().gradient_as_bucket_view(as_views).bucket_cap_mb(cap_mb);
    {
      const CUDAStreamGuard guard(made_there ? stream : home);
      trainer.emplace(self, options, hook_for(buckets, self));
    }
    torch::cuda::synchronize();
    const CUDAStreamGuard guard(stream);
    for (const auto& x : batches) late_step(*trainer, x);
    return flat_parameters(trainer->net);
  });
  CHECK(torch::equal(trained[0], train_plainly(kSteps)));
}

TEST_CASE("one bucket takes gradients of several streams", "[cuda][streams]") {
  if (lacks_cuda()) return;
  const auto trained = run_ranks<at::Tensor>(
      1, over("nccl"), [](const Rank& self) { return train_beside(/*apart=*/true, &self); });
  CHECK(torch::equal(trained[0], train_beside(/*apart=*/false, nullptr)));
}

TEST_CASE("views keep their memory when gradients are zeroed in place", "[cuda][streams]") {
  if (lacks_cuda()) return;
  const auto buckets = GENERATE(Buckets::Unused, Buckets::Reduced);
  CAPTURE(buckets == Buckets::Reduced);
  constexpr int kSteps = 5;
  const auto trained = run_ranks<at::Tensor>(1, over("nccl"), [&](const Rank& self) {
    CudaTrainer trainer(self, Options().gradient_as_bucket_view(true), hook_for(buckets, self));
    std::vector<const void*> places;
    for (int step = 0; step < kSteps; ++step) {
      trainer.optimizer.zero_grad(/*set_to_none=*/false);
      late(trainer.model->forward(cuda_batch(step))).pow(2).mean().backward();
      trainer.optimizer.step();
      std::vector<const void*> now;
      for (const auto& p : trainer.net->parameters()) now.push_back(p.grad().data_ptr());
      TORCH_CHECK(step < 2 || now == places, "step ", step, ": gradients moved");
      places = now;
    }
    return flat_parameters(trainer.net);
  });
  CHECK(torch::equal(trained[0], train_plainly(kSteps)));
}

TEST_CASE("the host does not wait between forward and the optimizer's step", "[cuda][waits]") {
  if (lacks_cuda()) return;
  const bool as_views = GENERATE(false, true);
  const auto buckets = GENERATE(Buckets::Unused, Buckets::Reduced);
  const bool unused = GENERATE(false, true);
  CAPTURE(as_views, buckets == Buckets::Reduced, unused);
  struct Seen {
    std::vector<std::string> waits, control;
    int64_t polls = 0, polls_of_control = 0;
    bool ran_ahead = false;
  };
  const auto seen = run_ranks<Seen>(1, over("nccl"), [&](const Rank& self) {
    CudaTrainer trainer(
        self, Options().gradient_as_bucket_view(as_views).find_unused_parameters(unused),
        hook_for(buckets, self));
    const auto x = cuda_batch(0);
    for (int step = 0; step < 5; ++step) trainer.step(x);
    torch::cuda::synchronize();
    Seen seen;
    at::cuda::sleep(kHalfASecond);
    at::cuda::CUDAEvent after_sleep;
    after_sleep.record();
    const HostWaits waits;
    for (int step = 0; step < 3; ++step) trainer.step(x);
    seen.ran_ahead = !after_sleep.query();
    seen.waits = waits.seen();
    seen.polls = waits.polls();
    // The same counters, with waits.
    const HostWaits control;
    for (int i = 0; i < 1000; ++i) (void)after_sleep.query();
    seen.polls_of_control = control.polls();
    after_sleep.synchronize();
    torch::cuda::synchronize();
    trainer.step(x).item<float>();
    seen.control = control.seen();
    return seen;
  });
  CHECK(seen[0].ran_ahead);
  CHECK(seen[0].waits == std::vector<std::string>{});
  // The allocators' looks at memory that other streams read; who polls asks more often.
  CHECK(seen[0].polls < 100);
  CHECK(seen[0].polls_of_control > 100);
  for (const char* call :
       {"cudaEventSynchronize", "cudaDeviceSynchronize", "cudaStreamSynchronize"}) {
    CAPTURE(call);
    CHECK(std::count(seen[0].control.begin(), seen[0].control.end(), call) > 0);
  }
}

TEST_CASE("the host does not wait for its input to arrive on the GPU", "[cuda][waits]") {
  if (lacks_cuda()) return;
  const bool pinned = GENERATE(false, true);
  const bool casts = GENERATE(false, true);
  CAPTURE(pinned, casts);
  const detail::InputPlacement placement{
      c10::Device(at::kCUDA, 0), casts ? std::optional(at::kBFloat16) : std::nullopt};
  auto x = torch::randn({256, 64});
  if (pinned) x = x.pin_memory();
  (void)placement.placed(x);
  torch::cuda::synchronize();
  at::cuda::sleep(kHalfASecond);
  at::cuda::CUDAEvent after_sleep;
  after_sleep.record();
  const HostWaits waits;
  const auto placed = placement.placed(x);
  const bool ran_ahead = !after_sleep.query();
  CHECK(waits.seen() == std::vector<std::string>{});
  CHECK(ran_ahead);
  x.zero_();  // only where the copy has its own memory
  CHECK((pinned || placed.to(at::kFloat).abs().max().item<float>() > 0));
}

TEST_CASE("gradients in buckets begin at multiples of 16 bytes", "[cuda][streams]") {
  if (lacks_cuda()) return;
  const auto train = [](auto& model, const torch::nn::Sequential& net) {
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    for (int step = 0; step < 4; ++step) train_step(model, optimizer, cuda_batch(step));
    return flattened(net->parameters()).cpu();
  };
  const auto make = [] {
    torch::manual_seed(1);
    torch::nn::Sequential net(torch::nn::Linear(64, 5), torch::nn::Linear(5, 3));
    net->to(c10::Device(at::kCUDA, 0));
    return net;
  };
  const auto of_rank =
      run_ranks<std::pair<at::Tensor, bool>>(1, over("nccl"), [&](const Rank& self) {
        const auto net = make();
        DistributedDataParallel<torch::nn::Sequential> model(
            net, Options().process_group(self.group).gradient_as_bucket_view(true));
        const auto values = train(model, net);
        bool aligned = true;
        for (const auto& p : net->parameters()) {
          aligned = aligned && reinterpret_cast<uintptr_t>(p.grad().data_ptr()) % 16 == 0 &&
                    p.grad().storage().nbytes() > p.grad().nbytes();  // in a bucket
        }
        return std::make_pair(values, aligned);
      });
  auto plain = make();
  CHECK(torch::equal(of_rank[0].first, train(plain, plain)));
  CHECK(of_rank[0].second);
}

}  // namespace ddp
