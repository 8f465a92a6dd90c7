// What the cases of cuda_world train, and what they compare with: a small network on one GPU.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ddp/ddp.h>
#include <torch/torch.h>

#include "support/compare.h"
#include "support/nets.h"

namespace ddp_cuda_world {

using Net = torch::nn::Sequential;
using Options = ddp::DistributedDataParallelOptions;

constexpr int kSteps = 5;
inline const c10::Device kGpu(at::kCUDA, 0);

// The group of the running case. Each case has one of its own, so a failure aborts no other case.
inline ddp::ProcessGroup group;

inline Options in_group() { return Options().process_group(group); }

inline Net make_net(bool normalizes = false) {
  Net net(torch::nn::Linear(20, 32));
  if (normalizes) net->push_back(torch::nn::BatchNorm1d(32));
  net->push_back(torch::nn::Tanh());
  net->push_back(torch::nn::Linear(32, 5));
  ddp::testing::draw_normal(*net, 0.3);
  net->to(kGpu);
  return net;
}

inline at::Tensor batch_of(int rank, int step) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 + 10 * step + rank);
  return torch::randn({16, 20}, generator).to(kGpu);
}

inline at::Tensor own_batch(int step) { return batch_of(ddp::get_rank(), step); }

inline at::Tensor all_batches(int step) {
  std::vector<at::Tensor> batches;
  for (int rank = 0; rank < ddp::get_world_size(); ++rank) batches.push_back(batch_of(rank, step));
  return torch::cat(batches);
}

inline at::Tensor loss_of(const at::Tensor& output) { return output.to(at::kFloat).pow(2).mean(); }

inline at::Tensor flat(const Net& net) { return ddp::testing::flattened(net->parameters()); }

template <typename Optimizer>
at::Tensor one_process(Net net, Optimizer&& optimizer) {
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    loss_of(net->forward(all_batches(step))).backward();
    optimizer.step();
  }
  return flat(net);
}

inline at::Tensor one_process() {
  auto net = make_net();
  return one_process(net, torch::optim::SGD(net->parameters(), 0.1));
}

/// Throws unless all ranks have the same model, and it is `expected` up to `tolerance`.
inline void check(const Net& net, const at::Tensor& expected, double tolerance = 1e-5) {
  TORCH_CHECK(ddp::replicas_equal(*net, group), "the ranks' models differ");
  const auto off = (flat(net) - expected).abs().max().item<double>();
  TORCH_CHECK(off <= tolerance, "parameters are off by ", off, ", more than ", tolerance);
}

/// Random numbers, the same on every rank.
inline at::Tensor drawn(std::vector<int64_t> sizes, uint64_t seed) {
  return torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed)).to(kGpu);
}

inline void check_near(const std::string& what, const at::Tensor& got, const at::Tensor& expected) {
  TORCH_CHECK(got.sizes() == expected.sizes(), what, ": sizes ", got.sizes());
  const auto off = (got - expected).abs().max().item<double>();
  TORCH_CHECK(off <= 1e-4, what, " is off by ", off);
}

using Case = std::pair<std::string, std::function<void()>>;

/// Models that are cut over the ranks.
std::vector<Case> cut_models();
/// Models that four ranks cut and replicate along two axes.
std::vector<Case> grids_of_four();

}  // namespace ddp_cuda_world
