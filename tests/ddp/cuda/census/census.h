// The cost of steps on a GPU, as lines of JSON: calls of the CUDA runtime, bytes, milliseconds.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

namespace ddp_cuda_census {

using Step = std::function<void()>;
using Net = torch::nn::Sequential;

inline const c10::Device kGpu(at::kCUDA, 0);

/// Small layers, so that the GPU's queue, which has about a thousand places, holds two steps.
constexpr int kLayers = 16;
constexpr int64_t kWidth = 64;

/// Linear layers on the GPU, with the same values on every rank.
Net make_layers(int count, int64_t width, bool normalizes = false);
at::Tensor make_input(int64_t width);
inline torch::optim::AdamWOptions adamw() { return torch::optim::AdamWOptions(1e-3); }

/// zero_grad, forward, backward and the optimizer's step of objects that outlive it.
template <typename Model>
Step step_of(Model& model, torch::optim::Optimizer& optimizer, const at::Tensor& input) {
  return [&model, &optimizer, input] {
    optimizer.zero_grad();
    model->forward(input).mean().backward();
    optimizer.step();
  };
}

/// Prints the calls of one step, of two that the host queues while the GPU sleeps, and whether it
/// had queued them before the GPU woke.
void count_calls(const std::string& name, const Step& step, int warmup = 5);

/// Prints the most bytes of tensors that two steps had above `before`, and beside them what the
/// documentation says.
void say_memory(const std::string& name, const Step& step, int64_t before, double expected);
/// The bytes of tensors on the GPU, after memory that is free has been given back.
int64_t allocated_bytes();

/// Prints the median time of a call until the GPU is done, in ms.
void say_time(const std::string& name, const Step& call, int warmup = 3, int repeats = 9);
/// Prints a time that was taken.
void say_ms(const std::string& name, double ms);

void count_wrapper_calls();
void count_cut_calls();
void measure_memory();
void measure_times();

}  // namespace ddp_cuda_census
