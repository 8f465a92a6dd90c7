// A whole training step captured for a CUDA graph, and replayed.
#include <ddp/captured_step.h>
#include <ddp/collectives.h>
#include <ddp/comm_hooks.h>
#include <ddp/optim.h>
#include <torch/torch.h>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>

#include "ddp/cuda_training.h"
#include "support/cuda.h"
#include "support/error_of.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace ddp::testing;
using c10::cuda::CUDAStreamGuard;
using c10::cuda::getStreamFromPool;
using Options = DistributedDataParallelOptions;

constexpr int kBefore = 3;  // steps, as docs/gpus.md says

/// The losses of steps, and the parameters at the end.
struct Outcome {
  at::Tensor losses;
  at::Tensor parameters;
};

/// Runs `kBefore` plain steps, and then so many that may be replays.
constexpr int kReplays = 6;

Outcome train_eagerly() {
  auto net = make_cuda_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  std::vector<at::Tensor> losses;
  for (int step = 0; step < kBefore + kReplays; ++step) {
    losses.push_back(train_step(net, optimizer, cuda_batch(step)));
  }
  return {torch::stack(losses).cpu(), flat_parameters(net)};
}

Outcome train_by_replays(CudaTrainer& trainer) {
  std::vector<at::Tensor> losses;
  const auto x = torch::empty_like(cuda_batch(0));
  for (int step = 0; step < kBefore; ++step) {
    x.copy_(cuda_batch(step));
    losses.push_back(trainer.step(x).clone());
  }
  torch::cuda::synchronize();
  trainer.optimizer.zero_grad();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  const auto loss = trainer.step(x);
  graph.capture_end();
  for (int step = kBefore; step < kBefore + kReplays; ++step) {
    x.copy_(cuda_batch(step));
    graph.replay();
    losses.push_back(loss.clone());
  }
  torch::cuda::synchronize();
  return {torch::stack(losses).cpu(), flat_parameters(trainer.net)};
}

}  // namespace

TEST_CASE("a captured step computes the same as one that is not captured", "[cuda][graph]") {
  if (lacks_cuda()) return;
  const bool as_views = GENERATE(false, true);
  const bool with_hook = GENERATE(false, true);  // a hook puts NCCL into the graph
  const bool unused = GENERATE(false, true);
  CAPTURE(as_views, with_hook, unused);
  const auto replayed = run_ranks<Outcome>(1, over("nccl"), [&](const Rank& self) {
    const CUDAStreamGuard guard(getStreamFromPool());
    const auto options = Options().gradient_as_bucket_view(as_views).find_unused_parameters(unused);
    CudaTrainer trainer(self, options, with_hook ? hooks::all_reduce(self.group) : nullptr);
    return train_by_replays(trainer);
  });
  const auto eager = train_eagerly();
  CHECK(torch::equal(replayed[0].losses, eager.losses));
  CHECK(torch::equal(replayed[0].parameters, eager.parameters));
}

TEST_CASE("steps after a capture work as before", "[cuda][graph]") {
  if (lacks_cuda()) return;
  const auto trained = run_ranks<at::Tensor>(1, over("nccl"), [&](const Rank& self) {
    const CUDAStreamGuard guard(getStreamFromPool());
    CudaTrainer trainer(self, Options(), hooks::all_reduce(self.group));
    train_by_replays(trainer);
    trainer.optimizer.zero_grad();
    for (int step = 0; step < 3; ++step) trainer.step(cuda_batch(kBefore + kReplays + step));
    return flat_parameters(trainer.net);
  });
  CHECK(torch::equal(trained[0], train_plainly(kBefore + kReplays + 3)));
}

TEST_CASE("a collective is captured and replayed", "[cuda][graph]") {
  if (lacks_cuda()) return;
  const auto sums = run_ranks<at::Tensor>(1, over("nccl"), [](const Rank& self) {
    const CUDAStreamGuard guard(getStreamFromPool());
    auto tensor = torch::ones({1000}, c10::Device(at::kCUDA, 0));
    all_reduce(tensor, c10d::ReduceOp::SUM, self.group);  // connects NCCL before the capture
    torch::cuda::synchronize();
    at::cuda::CUDAGraph graph;
    graph.capture_begin();
    tensor.mul_(2);
    all_reduce(tensor, c10d::ReduceOp::SUM, self.group);
    tensor.add_(1);
    graph.capture_end();
    for (int i = 0; i < 3; ++i) graph.replay();
    return tensor.cpu();
  });
  CHECK(torch::equal(sums[0], torch::full({1000}, 15.)));
}

TEST_CASE(
    "a capture that begins too early throws, and training continues", "[cuda][graph][errors]") {
  if (lacks_cuda()) return;
  const auto errors = run_ranks<std::string>(1, over("nccl"), [](const Rank& self) {
    const CUDAStreamGuard guard(getStreamFromPool());
    CudaTrainer trainer(self);
    const auto x = cuda_batch(0);
    torch::cuda::synchronize();
    at::cuda::CUDAGraph graph;
    graph.capture_begin();
    const auto error = error_of<c10::Error>([&] { trainer.step(x); });
    graph.capture_end();
    for (int step = 0; step < 3; ++step) trainer.step(x);
    return error;
  });
  CHECK_THAT(errors[0], ContainsText("Run at least 3 steps on the capturing stream before"));
}

TEST_CASE("CapturedStep computes the same as a step that is not captured", "[cuda][graph]") {
  if (lacks_cuda()) return;
  const auto replayed = run_ranks<Outcome>(1, over("nccl"), [](const Rank& self) {
    const CUDAStreamGuard guard(getStreamFromPool());
    CudaTrainer trainer(self, Options(), hooks::all_reduce(self.group));
    const auto x = torch::empty_like(cuda_batch(0));
    CapturedStep step(
        [&] { return trainer.step(x); }, CapturedStepOptions().optimizers({&trainer.optimizer}));
    std::vector<at::Tensor> losses;
    for (int i = 0; i < kBefore + kReplays; ++i) {
      x.copy_(cuda_batch(i));
      losses.push_back(step().clone());
    }
    torch::cuda::synchronize();
    return Outcome{torch::stack(losses).cpu(), flat_parameters(trainer.net)};
  });
  const auto eager = train_eagerly();
  CHECK(torch::equal(replayed[0].losses, eager.losses));
  CHECK(torch::equal(replayed[0].parameters, eager.parameters));
}

TEST_CASE("replays take the rates of a schedule from fused optimizers", "[cuda][graph]") {
  if (lacks_cuda()) return;
  const auto with = [](auto make_optimizer) {
    // Rates that float32 has exactly, as the device does.
    const std::vector<double> rates{0.5, 0.5, 0.5, 0.25, 0.25, 0.125, 0.0625, 0.03125, 0.5};
    const auto train = [&](auto& model, CudaNet& net, bool captures) {
      const auto optimizer = make_optimizer(net->parameters());
      const auto x = torch::empty_like(cuda_batch(0));
      const auto run = [&] { return train_step(model, *optimizer, x); };
      CapturedStep captured(run, CapturedStepOptions().optimizers({optimizer.get()}));
      std::vector<at::Tensor> losses;
      for (size_t step = 0; step < rates.size(); ++step) {
        x.copy_(cuda_batch(step));
        optimizer->param_groups()[0].options().set_lr(rates[step] / 64);
        losses.push_back((captures ? captured() : run()).clone());
      }
      torch::cuda::synchronize();
      TORCH_CHECK(captured.is_captured() == captures);
      return Outcome{torch::stack(losses).cpu(), flat_parameters(net)};
    };
    const auto replayed = run_ranks<Outcome>(1, over("nccl"), [&](const Rank& self) {
      const CUDAStreamGuard guard(getStreamFromPool());
      CudaTrainer trainer(self, Options(), hooks::all_reduce(self.group));
      return train(trainer.model, trainer.net, true);
    });
    auto net = make_cuda_net();
    const auto eager = train(net, net, false);
    CHECK(torch::equal(replayed[0].losses, eager.losses));
    CHECK(torch::equal(replayed[0].parameters, eager.parameters));
  };
  with([](const auto& p) {
    return std::make_unique<optim::AdamW>(p, torch::optim::AdamWOptions(0.5));
  });
  with([](const auto& p) {
    return std::make_unique<optim::SGD>(p, torch::optim::SGDOptions(0.5).momentum(0.5));
  });
  with([](const auto& p) {
    return std::make_unique<optim::Adagrad>(p, torch::optim::AdagradOptions(0.5));
  });
}

TEST_CASE("a replay refuses another rate for an optimizer that holds it", "[cuda][graph][errors]") {
  if (lacks_cuda()) return;
  const CUDAStreamGuard guard(getStreamFromPool());
  auto net = make_cuda_net();
  torch::optim::SGD optimizer(net->parameters(), 0.5);
  const auto x = cuda_batch(0);
  CapturedStep step(
      [&] { return train_step(net, optimizer, x); },
      CapturedStepOptions().optimizers({&optimizer}));
  for (int i = 0; i < 5; ++i) step();
  optimizer.param_groups()[0].options().set_lr(0.25);
  CHECK_THAT(error_of<c10::Error>([&] { step(); }), ContainsText("got lr = 0.25 in place of 0.5"));
}

TEST_CASE("CapturedStep names what waits for the device", "[cuda][graph][errors]") {
  if (lacks_cuda()) return;
  const CUDAStreamGuard guard(getStreamFromPool());
  const auto value = torch::ones({1}, c10::Device(at::kCUDA, 0));
  CapturedStep step([&] { return value * value.item<float>(); });
  for (int i = 0; i < 3; ++i) step();
  CHECK_THAT(
      error_of<c10::Error>([&] { step(); }),
      ContainsText(
          "CapturedStep: expected a step that waits for nothing, got one that failed in "));
  CHECK(torch::ones({1}, c10::Device(at::kCUDA, 0)).item<float>() == 1);
}

}  // namespace ddp
