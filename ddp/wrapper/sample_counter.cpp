#include "wrapper/sample_counter.h"

#include <algorithm>
#include <utility>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

namespace ddp {

/// A forward pass that no backward pass went through yet. The hooks on its outputs own it, so it is
/// destroyed with the outputs' graph.
struct SampleCounter::Forward {
  struct Output {
    const torch::autograd::Node* node;
    std::weak_ptr<void> alive;
  };

  double samples = 0;
  std::vector<Output> outputs;
};

struct SampleCounter::Counts {
  std::mutex mutex;
  double counted = 0;
  std::vector<std::weak_ptr<Forward>> waiting;

  void count(Forward& forward) {
    const std::lock_guard lock(mutex);
    counted += std::exchange(forward.samples, 0);
  }
};

SampleCounter::SampleCounter() : counts_(std::make_shared<Counts>()) {}

void SampleCounter::add_forward(
    double samples, const std::vector<at::Tensor>& outputs, bool complete) {
  const auto forward = std::make_shared<Forward>();
  forward->samples = samples;
  for (const auto& output : outputs) {
    if (!output.defined() || !output.grad_fn()) continue;
    auto alive = std::make_shared<char>();
    forward->outputs.push_back({output.grad_fn().get(), alive});
    output.register_hook(
        [counts = counts_, forward, alive](const at::Tensor&) { counts->count(*forward); });
  }
  if (forward->outputs.empty()) {
    if (!complete) add(samples);
    return;
  }
  const std::lock_guard lock(counts_->mutex);
  auto& waiting = counts_->waiting;
  waiting.erase(
      std::remove_if(
          waiting.begin(), waiting.end(), [](const auto& earlier) { return earlier.expired(); }),
      waiting.end());
  waiting.push_back(forward);
}

void SampleCounter::add(double samples) {
  const std::lock_guard lock(counts_->mutex);
  counts_->counted += samples;
}

// The hooks alone would count too late: the averaged pass begins at the first of several outputs,
// before the hooks of the others have run.
void SampleCounter::begin_backward() {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return;
  std::vector<std::weak_ptr<Forward>> waiting;
  {
    const std::lock_guard lock(counts_->mutex);
    waiting = counts_->waiting;
  }
  for (const auto& one : waiting) {
    const auto forward = one.lock();
    if (!forward) continue;
    const bool is_in_graph = std::any_of(
        forward->outputs.begin(), forward->outputs.end(), [&](const Forward::Output& output) {
          return !output.alive.expired() &&
                 nodes->count(const_cast<torch::autograd::Node*>(output.node)) > 0;
        });
    if (is_in_graph) counts_->count(*forward);
  }
}

double SampleCounter::counted() const {
  const std::lock_guard lock(counts_->mutex);
  return counts_->counted;
}

void SampleCounter::clear() {
  const std::lock_guard lock(counts_->mutex);
  counts_->counted = 0;
}

}  // namespace ddp
