#include "wrapper/sample_counter.h"

#include <algorithm>
#include <cstdint>
#include <mutex>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

namespace ddp {

/// A forward pass whose graph is alive: the hooks on its outputs own it.
struct SampleCounter::Forward {
  struct Output {
    const torch::autograd::Node* node;
    std::weak_ptr<void> alive;
  };

  double samples = 0;
  bool counts = true;
  uint64_t counted_for = 0;  // the averaged pass
  std::vector<Output> outputs;

  // Autograd lists all nodes of a pass but the one at which it begins, which runs first.
  bool is_in(const Nodes& nodes) const {
    const auto* current = torch::autograd::get_current_node().get();
    return std::any_of(outputs.begin(), outputs.end(), [&](const Output& output) {
      return !output.alive.expired() &&
             (output.node == current ||
              nodes.count(const_cast<torch::autograd::Node*>(output.node)) > 0);
    });
  }
};

struct SampleCounter::Counts {
  std::mutex mutex;
  double counted = 0;
  uint64_t pass = 1;  // the number of the next averaged one
  std::vector<std::weak_ptr<Forward>> forwards;

  void count(Forward& forward) {
    const std::lock_guard lock(mutex);
    if (!forward.counts || forward.counted_for == pass) return;
    // A forward pass that is in the average already counts anew where more is accumulated.
    const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
    if (forward.counted_for > 0 && wanted && !wanted->empty()) return;
    forward.counted_for = pass;
    counted += forward.samples;
  }
};

SampleCounter::SampleCounter() : counts_(std::make_shared<Counts>()) {}

void SampleCounter::add_forward(
    double samples, const std::vector<at::Tensor>& outputs, bool complete, bool counts) {
  const auto forward = std::make_shared<Forward>();
  forward->samples = samples;
  forward->counts = counts;
  for (const auto& output : outputs) {
    if (!output.defined() || !output.grad_fn()) continue;
    auto alive = std::make_shared<char>();
    forward->outputs.push_back({output.grad_fn().get(), alive});
    output.register_hook(
        [counts = counts_, forward, alive](const at::Tensor&) { counts->count(*forward); });
  }
  if (forward->outputs.empty()) {
    if (!complete && counts) add(samples);
    return;
  }
  const std::lock_guard lock(counts_->mutex);
  auto& forwards = counts_->forwards;
  forwards.erase(
      std::remove_if(
          forwards.begin(), forwards.end(), [](const auto& earlier) { return earlier.expired(); }),
      forwards.end());
  forwards.push_back(forward);
}

void SampleCounter::add(double samples) {
  const std::lock_guard lock(counts_->mutex);
  counts_->counted += samples;
}

std::vector<std::shared_ptr<SampleCounter::Forward>> SampleCounter::forwards_in(
    const Nodes& nodes) const {
  const std::lock_guard lock(counts_->mutex);
  std::vector<std::shared_ptr<Forward>> found;
  for (const auto& one : counts_->forwards) {
    const auto forward = one.lock();
    if (forward && forward->is_in(nodes)) found.push_back(forward);
  }
  return found;
}

// The hooks alone would count too late: the averaged pass begins at the first of several outputs,
// before the hooks of the others have run.
void SampleCounter::begin_backward() {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return;
  for (const auto& forward : forwards_in(*nodes)) counts_->count(*forward);
}

bool SampleCounter::is_in(const Nodes& nodes) const { return !forwards_in(nodes).empty(); }

double SampleCounter::samples_of(const Nodes& nodes) const {
  double samples = 0;
  for (const auto& forward : forwards_in(nodes)) samples += forward->samples;
  return samples;
}

double SampleCounter::counted() const {
  const std::lock_guard lock(counts_->mutex);
  return counts_->counted;
}

void SampleCounter::clear() {
  const std::lock_guard lock(counts_->mutex);
  counts_->counted = 0;
  ++counts_->pass;
}

}  // namespace ddp
