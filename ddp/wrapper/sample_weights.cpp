#include "wrapper/sample_weights.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/sample_weight.h>
#include <ddp/internal/text.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "join/join_round.h"

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
    return any_of(outputs, [&](const Output& output) {
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
  drop_if(forwards, [](const auto& earlier) { return earlier.expired(); });
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

/// A backward pass that goes through outputs of a model.
struct SampleWeights::Running {
  SampleWeights* weights;
  int task;        // autograd's number of the pass
  double samples;  // of the forward passes that it goes through
  bool accumulates;
};

namespace {

// The passes that this thread runs, which own what is referred to. One inside of them
// (checkpoint()) does not go through the outputs itself.
template <typename Running>
std::vector<std::weak_ptr<Running>>& running_on_thread() {
  thread_local std::vector<std::weak_ptr<Running>> running;
  return running;
}

struct Registry {
  std::mutex mutex;
  std::vector<SampleWeights*> all;
};

// Never destroyed: a wrapper may be destroyed at the end of the process.
Registry& registry() {
  static auto* registry = new Registry;
  return *registry;
}

double sum_of(const std::vector<double>& samples) {
  return std::accumulate(samples.begin(), samples.end(), 0.0);
}

bool are_same_parts(const std::vector<double>& a, const std::vector<double>& b) {
  const double of_a = sum_of(a), of_b = sum_of(b);
  for (size_t rank = 0; rank < a.size(); ++rank) {
    if (a[rank] * of_b != b[rank] * of_a) return false;
  }
  return true;
}

double weight_of(const std::vector<double>& samples, int rank) {
  const double mine = samples[static_cast<size_t>(rank)];
  return mine == 0 ? 1 : static_cast<double>(samples.size()) * mine / sum_of(samples);
}

}  // namespace

SampleWeights::SampleWeights(
    Joinable& model, const SampleCounter& samples, ProcessGroup group,
    std::shared_ptr<GroupMonitor> monitor, Accumulates accumulates)
    : model_(model),
      samples_(samples),
      group_(std::move(group)),
      monitor_(std::move(monitor)),
      accumulates_(std::move(accumulates)),
      self_(std::make_shared<SampleWeights*>(this)) {
  const std::lock_guard lock(registry().mutex);
  registry().all.push_back(this);
}

SampleWeights::~SampleWeights() {
  *self_ = nullptr;
  const std::lock_guard lock(registry().mutex);
  auto& all = registry().all;
  all.erase(std::remove(all.begin(), all.end(), this), all.end());
}

void SampleWeights::watch(const std::vector<at::Tensor>& outputs) {
  for (const auto& output : outputs) {
    if (!output.defined() || !output.grad_fn()) continue;
    output.register_hook([self = self_](const at::Tensor&) {
      if (*self) (*self)->enter();
    });
  }
}

void SampleWeights::enter() {
  const int task = torch::autograd::get_current_graph_task_id();
  auto& all = running_on_thread<Running>();
  bool is_known = false;
  const auto is_over = [&](const auto& one) {
    const auto running = one.lock();
    is_known = is_known || (running && running->weights == this && running->task == task);
    return !running;
  };
  drop_if(all, is_over);
  if (is_known) return;
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto running = std::make_shared<Running>(
      Running{this, task, nodes ? samples_.samples_of(*nodes) : 0, accumulates_()});
  all.push_back(running);
  torch::autograd::Engine::get_default_engine().queue_callback([running] {});
}

double SampleWeights::weight_in(const Running& running) {
  if (!running.accumulates || group_->getSize() == 1) return 1;
  const std::lock_guard lock(mutex_);
  mix_ = true;
  if (!agreed_.empty()) return weight_of(agreed_, group_->getRank());
  if (taken_.empty() || last_task_ != running.task) {
    RankStatus mine;
    mine.active = true;
    mine.samples = running.samples;
    taken_.push_back(
        all_reduce_status(mine, group_, model_.join_device(), *monitor_).samples_by_rank());
    last_task_ = running.task;
  }
  return weight_of(taken_.back(), group_->getRank());
}

void SampleWeights::agree(std::vector<double> samples) {
  const std::lock_guard lock(mutex_);
  for (const auto& taken : taken_) {
    if (are_same_parts(taken, samples)) continue;
    monitor_->throw_agreed(ddp::str(
        "DistributedDataParallel: expected each rank to have the same part of the samples in every "
        "backward pass that is averaged together, where passes go through collectives "
        "(SyncBatchNorm, ddp::functional) with Reduction::SampleWeighted, got samples by rank [",
        joined_by(", ", taken), "] in one pass and [", joined_by(", ", samples),
        "] in all. Leave no_sync() out: averaged passes add up."));
  }
  agreed_ = std::move(samples);
}

bool SampleWeights::mix() const {
  const std::lock_guard lock(mutex_);
  return mix_;
}

void SampleWeights::end() {
  const std::lock_guard lock(mutex_);
  agreed_.clear();
  taken_.clear();
}

double sample_weight() {
  using Running = SampleWeights::Running;
  const int task = torch::autograd::get_current_graph_task_id();
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  std::vector<Running> found, outer;
  for (const auto& one : running_on_thread<Running>()) {
    const auto running = one.lock();
    if (running) (running->task == task ? found : outer).push_back(*running);
  }
  const size_t known = found.size();
  {
    const std::lock_guard lock(registry().mutex);
    for (auto* weights : registry().all) {
      const auto is_its = [&](const Running& running) { return running.weights == weights; };
      if (!nodes || any_of(found, is_its)) continue;
      if (!weights->samples_.is_in(*nodes)) continue;
      found.push_back({weights, task, weights->samples_.samples_of(*nodes), false});
    }
  }
  for (size_t i = known; i < found.size(); ++i) {
    found[i].accumulates = found[i].weights->accumulates_();
  }
  if (found.empty()) found = outer;
  std::optional<double> weight;
  for (const auto& running : found) {
    const double own = running.weights->weight_in(running);
    DDP_CHECK(
        !weight || *weight == own,
        "DistributedDataParallel: expected the models of one backward pass through collectives to "
        "have the same parts of their samples on each rank with Reduction::SampleWeighted, got "
        "weights of ",
        *weight, " and ", own, " on ", running.weights->monitor_->rank_text(),
        ". Say with count_samples() how many samples a forward pass has.");
    weight = own;
  }
  return weight.value_or(1);
}

}  // namespace ddp
