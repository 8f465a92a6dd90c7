// Failures of two ranks over NCCL: cuda_failures CASE, once for each rank, with a short timeout
// around both. The ranks may share a GPU: scripts/gpu_check.sh has the environment. Each rank
// judges itself: it prints "failed: ..." and ends with 1, or "ok" and with 0.
#include <csignal>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAGuard.h>
#include <ddp/ddp.h>
#include <torch/torch.h>

#include "support/error_of.h"

namespace ddp_cuda_failures {

namespace {

using Clock = std::chrono::steady_clock;
using Options = ddp::ProcessGroupOptions;
using std::chrono::seconds;

constexpr int kFailingStep = 5;
const c10::Device kGpu(at::kCUDA, 0);

void init(seconds timeout = seconds(20)) {
  ddp::init_process_group(Options().backend("cuda:nccl").timeout(timeout));
}

bool is_second() { return ddp::get_rank() == 1; }

/// Throws unless `call` throws an error with these words, in so many seconds.
void expect_error(
    double within, const std::vector<std::string>& words, const std::function<void()>& call) {
  const auto [text, took] = ddp::testing::timed_error_of<c10::Error>(call);
  TORCH_CHECK(!text.empty(), "no error came");
  for (const auto& word : words) {
    TORCH_CHECK(text.find(word) != std::string::npos, "no '", word, "' in: ", text);
  }
  TORCH_CHECK(took < within, "the error took ", took, " s: ", text);
}

at::Tensor ones(int64_t count = 1) { return torch::ones({count}, kGpu); }

struct Trainer {
  torch::nn::Linear net{64, 64};
  ddp::DistributedDataParallel<torch::nn::Linear> model;
  torch::optim::SGD optimizer;

  Trainer() : model(on_gpu(net)), optimizer(net->parameters(), 0.01) {}
  static torch::nn::Linear on_gpu(torch::nn::Linear net) {
    net->to(kGpu);
    return net;
  }
  at::Tensor step(bool skip_bias = false) {
    optimizer.zero_grad();
    const auto x = torch::ones({32, 64}, kGpu);
    auto y = model->forward(x);
    if (skip_bias) y = torch::nn::functional::linear(x, net->weight);
    const auto loss = y.pow(2).mean();
    loss.backward();
    optimizer.step();
    return loss.detach();
  }
};

/// Rank 0 waits for its device in each step, and rank 1 ends in one of them.
void end_in_training(const std::function<void()>& end) {
  init(seconds(120));
  Trainer trainer;
  if (!is_second()) {
    expect_error(20, {"rank 1"}, [&] {
      for (int step = 0; step < 1000; ++step) (void)trainer.step().item<float>();
    });
    return;
  }
  for (int step = 0; step < kFailingStep; ++step) (void)trainer.step().item<float>();
  end();
}

void throw_in_training() {
  try {
    end_in_training([] { throw std::runtime_error("the batch is empty"); });
  } catch (const std::runtime_error&) {
    ddp::abort_process_group();
  }
}

void kill_in_training() {
  end_in_training([] { (void)std::raise(SIGKILL); });
}

/// After a timeout that the program catches it makes a new group, and lives on.
void outlive_timeout() {
  init(seconds(5));
  auto sum = ones();
  ddp::all_reduce(sum);
  if (is_second()) {
    std::this_thread::sleep_for(seconds(12));
  } else {
    auto late = ones();
    expect_error(40, {"timed out"}, [&] {
      ddp::all_reduce(late);
      (void)late.item<float>();
      const auto end = Clock::now() + seconds(15);
      while (Clock::now() < end) {  // the next call throws once the failure is found
        ddp::all_reduce(late);
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
      }
    });
  }
  ddp::destroy_process_group();
  ddp::init_process_group(
      Options()
          .backend("cuda:nccl")
          .timeout(seconds(20))
          .init_method("file://" + std::string(std::getenv("DDP_SECOND_STORE"))));
  auto again = ones();
  ddp::all_reduce(again);
  TORCH_CHECK(again.item<float>() == 2, "the new group's sum is ", again.item<float>());
  std::this_thread::sleep_for(seconds(5));
}

void drop_groups() {
  init();
  for (int i = 0; i < 20; ++i) {
    auto big = ones(int64_t{64} << 20);
    {
      const auto group = ddp::new_group({0, 1});
      ddp::all_reduce(big, group);
    }
    TORCH_CHECK((big == 2).all().item<bool>(), "group ", i, ": the result was lost");
  }
}

void abort_two_groups() {
  init(seconds(60));
  const auto first = ddp::new_group({0, 1}), second = ddp::new_group({0, 1});
  for (const auto& group : {first, second}) {
    auto sum = ones();
    ddp::all_reduce(sum, group);
    (void)sum.item<float>();
  }
  if (is_second()) {
    std::this_thread::sleep_for(seconds(8));
    return;
  }
  auto hung = ones();
  ddp::all_reduce(hung, second);
  const auto begin = Clock::now();
  ddp::abort_process_group(first);
  torch::cuda::synchronize();
  const std::chrono::duration<double> took = Clock::now() - begin;
  TORCH_CHECK(took.count() < 6, "aborting took ", took.count(), " s");
}

void connect_without_peer() {
  if (std::string(std::getenv("RANK")) == "1") {
    std::this_thread::sleep_for(seconds(1));
    return;
  }
  expect_error(14, {}, [] {
    ddp::init_process_group(Options().backend("cuda:nccl").timeout(seconds(6)).device_id(kGpu));
  });
}

void connect_at_once() {
  ddp::init_process_group(Options().backend("cuda:nccl").timeout(seconds(20)).device_id(kGpu));
  ddp::barrier();
  auto sum = ones();
  ddp::all_reduce(sum);
  TORCH_CHECK(sum.item<float>() == 2);
  ddp::destroy_process_group();
}

/// Groups of one communicator, which NCCL splits.
void split_groups() {
  ddp::init_process_group(Options()
                              .backend("cuda:nccl")
                              .timeout(seconds(20))
                              .device_id(kGpu)
                              .nccl(ddp::NcclOptions().split_share(true)));
  const auto both = ddp::new_group({0, 1}), alone = ddp::new_group({0});
  const auto turned = ddp::split_group(0, -ddp::get_rank());
  for (const auto& group : {both, turned}) {
    auto sum = ones();
    ddp::all_reduce(sum, group);
    TORCH_CHECK(sum.item<float>() == 2);
  }
  TORCH_CHECK(ddp::get_rank(turned) == 1 - ddp::get_rank());
  ddp::destroy_process_group();
}

void settle() {
  init();
  Trainer trainer;
  for (int step = 0; step < 4; ++step) trainer.step();
  trainer.model->settle();
  trainer.step(/*skip_bias=*/is_second());
  expect_error(15, {"without gradients"}, [&] { trainer.model->settle(); });
  trainer.step();
  trainer.model->settle();
}

void exchange_messages() {
  init();
  const int peer = 1 - ddp::get_rank();
  const auto sent = torch::full({int64_t{16} << 20}, 1.F + ddp::get_rank(), kGpu);
  auto received = torch::zeros_like(sent);
  const auto works =
      ddp::batch_isend_irecv({ddp::P2POp::send(sent, peer), ddp::P2POp::recv(received, peer)});
  for (const auto& work : works) work->wait();
  TORCH_CHECK((received == 1.F + peer).all().item<bool>(), "another message came");
  ddp::destroy_process_group();
}

void capture_step() {
  init();
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  Trainer trainer;
  ddp::CapturedStep step(
      [&] { return trainer.step(); }, ddp::CapturedStepOptions().optimizers({&trainer.optimizer}));
  at::Tensor loss;
  for (int i = 0; i < 8; ++i) loss = step();
  TORCH_CHECK(step.is_captured() && loss.isfinite().item<bool>());
  ddp::destroy_process_group();  // releases the graph
}

void leave_without_destroy() {
  init();
  auto sum = ones();
  ddp::all_reduce(sum);
}

void poll_parts() {
  init();
  std::vector<at::Tensor> outputs{torch::zeros({1}, kGpu), torch::zeros({2}, kGpu)};
  const auto own = torch::full({ddp::get_rank() + 1}, 1.F + ddp::get_rank(), kGpu);
  const auto work = ddp::all_gather_async(outputs, own);
  while (!work->isCompleted()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  TORCH_CHECK(work->isSuccess() && outputs[1].sum().item<float>() == 4);
  const auto values = ddp::all_gather_async(outputs, own)->getFuture();
  values->wait();
  TORCH_CHECK(outputs[0].item<float>() == 1);
  ddp::destroy_process_group();
}

void barrier_without_peer() {
  init(seconds(120));
  ddp::barrier();
  if (is_second()) {
    std::this_thread::sleep_for(seconds(1));
    return ddp::abort_process_group();
  }
  expect_error(10, {"rank 1"}, [] { ddp::barrier(); });
}

void refuse_sparse() {
  init();
  torch::nn::Embedding net(torch::nn::EmbeddingOptions(10, 4).sparse(true));
  net->to(kGpu);
  expect_error(
      10, {"without sparse all-reduce, nccl"}, [&] { ddp::DistributedDataParallel model(net); });
}

/// Units of equal size, whose gathers and reductions fit to each other.
struct UnitsImpl : torch::nn::Module {
  using Unit = ddp::FullyShardedDataParallel<torch::nn::Linear>;

  UnitsImpl() {
    for (const char* name : {"one", "two", "three"}) {
      units.push_back(register_module(name, Unit(Trainer::on_gpu(torch::nn::Linear(64, 64)))));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < units.size(); ++i) {
      if (i != left_out) x = units[i]->forward(x);
    }
    return x;
  }
  size_t left_out = 3;
  std::vector<Unit> units;
};
TORCH_MODULE(Units);

/// A rank leaves a unit of a sharded model out of a later step.
void leave_out_unit() {
  init();
  Units net;
  ddp::FullyShardedDataParallel model(net);
  expect_error(25, {"FullyShardedDataParallel"}, [&] {
    for (int step = 0; step < 8; ++step) {
      if (step == kFailingStep && is_second()) net->left_out = 1;
      const auto loss = model->forward(torch::ones({1, 64}, kGpu)).sum();
      loss.backward();
      (void)loss.item<float>();
    }
  });
}

const std::map<std::string, std::function<void()>>& cases() {
  static const std::map<std::string, std::function<void()>> all{
      {"throws", throw_in_training},
      {"killed", kill_in_training},
      {"timeout", outlive_timeout},
      {"dropped", drop_groups},
      {"two_groups", abort_two_groups},
      {"connects", connect_at_once},
      {"connects_alone", connect_without_peer},
      {"settle", settle},
      {"split", split_groups},
      {"messages", exchange_messages},
      {"captured", capture_step},
      {"leaves", leave_without_destroy},
      {"polls", poll_parts},
      {"barrier", barrier_without_peer},
      {"sparse", refuse_sparse},
      {"units", leave_out_unit}};
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  const auto found = argc == 2 ? cases().find(argv[1]) : cases().end();
  if (found == cases().end()) {
    std::fprintf(stderr, "usage: cuda_failures CASE\n");
    return 2;
  }
  if (!torch::cuda::is_available()) {
    std::printf("skipped: no CUDA device\n");
    return 0;
  }
  try {
    found->second();
    std::printf("ok\n");
    return 0;
  } catch (const std::exception& error) {
    std::printf("failed: %s: %s\n", argv[1], error.what());
    return 1;
  }
}

}  // namespace ddp_cuda_failures
