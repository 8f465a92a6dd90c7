// A tiny network whose layers are the stages of a pipeline, the same in one process, and counts of
// collectives, for tests that compare the two.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/record_function.h>
#include <ddp/ddp.h>
#include <torch/torch.h>

#include "support/compare.h"
#include "support/nets.h"
#include "support/ranks.h"

namespace ddp::testing {

constexpr int64_t kPipelineWidth = 5;

inline void draw_parameters(torch::nn::Module& module, uint64_t seed) {
  module.to(torch::kDouble);
  draw_normal(module, 0.4, seed);
}

/// Layer k; it has the same values wherever it is made.
struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(int64_t k)
      : fc(register_module("fc", torch::nn::Linear(kPipelineWidth, kPipelineWidth))) {
    draw_parameters(*this, static_cast<uint64_t>(k) + 1);
  }
  at::Tensor forward(const at::Tensor& x) {
    TORCH_CHECK(x.size(0) > 0, "a layer without rows");
    return torch::tanh(fc->forward(x)) + 0.5 * x;
  }
  torch::nn::Linear fc;
};
TORCH_MODULE(Layer);

/// Layer k, whose forward is `run`.
struct RunLayerImpl : torch::nn::Module {
  using Run = std::function<at::Tensor(Layer& layer, const at::Tensor& x)>;
  RunLayerImpl(int64_t k, Run run)
      : layer(register_module("layer", Layer(k))), run(std::move(run)) {}
  at::Tensor forward(const at::Tensor& x) { return run(layer, x); }
  Layer layer;
  Run run;
};
TORCH_MODULE(RunLayer);

struct PipelineBatch {
  at::Tensor input, target;
};
inline PipelineBatch pipeline_batch(int64_t rows, int64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed) + 100);
  const auto draw = [&] {
    return torch::randn({rows, kPipelineWidth}, generator, torch::dtype(torch::kDouble));
  };
  auto input = draw();
  return {input, draw()};
}

inline at::Tensor pipeline_loss(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).pow(2).mean();
}

inline torch::optim::SGD pipeline_optimizer(const std::vector<at::Tensor>& parameters) {
  return torch::optim::SGD(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
}

/// The whole network in one process.
struct WholeNet {
  explicit WholeNet(int64_t layers) {
    for (int64_t k = 0; k < layers; ++k) this->layers.emplace_back(k);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = layer->forward(x);
    return x;
  }
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (const auto& layer : layers) {
      for (const auto& p : layer->parameters()) all.push_back(p);
    }
    return all;
  }
  std::vector<Layer> layers;
};

/// Counts the calls of c10d's operators on this thread, by name: "c10d::send".
class CountedCalls {
 public:
  CountedCalls()
      : handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(&CountedCalls::count).scopes({at::RecordScope::FUNCTION}))) {
    counts().clear();
  }
  ~CountedCalls() { at::removeCallback(handle_); }
  CountedCalls(const CountedCalls&) = delete;
  CountedCalls& operator=(const CountedCalls&) = delete;

  static int64_t of(const std::string& name) { return counts()[name]; }

 private:
  static std::map<std::string, int64_t>& counts() {
    thread_local std::map<std::string, int64_t> counts;
    return counts;
  }
  static std::unique_ptr<at::ObserverContext> count(const at::RecordFunction& call) {
    const std::string name = call.name();
    if (name.rfind("c10d::", 0) == 0) ++counts()[name];
    return nullptr;
  }
  at::CallbackHandle handle_;
};

}  // namespace ddp::testing
