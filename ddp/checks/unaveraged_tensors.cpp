#include "checks/unaveraged_tensors.h"

#include <algorithm>
#include <unordered_set>

#include <ddp/internal/gather_strings.h>
#include <ddp/internal/join_names.h>
#include <ddp/internal/reducer.h>
#include <ddp/internal/text.h>
#include <ddp/internal/value_sample.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include "replicas/replica_check.h"

namespace ddp {
namespace {

// More than one: a tensor may enter the loss late, and an optimizer may skip steps.
constexpr int kStrayPasses = 3;

// Reads the protected member: Module::parameters() builds every name, and this runs in each step.
struct OwnParameters : torch::nn::Module {
  static const torch::OrderedDict<std::string, at::Tensor>& of(const torch::nn::Module& module) {
    return module.*&OwnParameters::parameters_;
  }
};

// Whether a walk over the modules finds exactly `tensors`, from `next` on.
bool walk_matches(
    const torch::nn::Module& module, const std::vector<const void*>& tensors, size_t& next) {
  for (const auto& p : OwnParameters::of(module)) {
    if (next == tensors.size() || tensors[next++] != p.value().unsafeGetTensorImpl()) return false;
  }
  for (const auto& child : module.children()) {
    if (!walk_matches(*child, tensors, next)) return false;
  }
  return true;
}

void collect(const torch::nn::Module& module, std::vector<const void*>& tensors) {
  for (const auto& p : OwnParameters::of(module)) {
    tensors.push_back(p.value().unsafeGetTensorImpl());
  }
  for (const auto& child : module.children()) collect(*child, tensors);
}

}  // namespace

ParameterWatch::ParameterWatch(const torch::nn::Module& root, const Names& ignored)
    : root_(root), ignored_(ignored) {
  collect(root_, tensors_);
  for (const auto& name : root_.named_parameters().keys()) known_.insert(name);
}

void ParameterWatch::warn_of_new(const GroupMonitor& monitor) {
  const auto names = find_new();
  if (names.empty()) return;
  TORCH_WARN(
      "DistributedDataParallel: expected the parameters that the module had when it was wrapped, "
      "got ",
      names.size(), " more on ", monitor.rank_text(), " (", join_names(names),
      "), whose gradients are not averaged. Call model->refresh() on every rank, and give them to "
      "the optimizer.");
}

std::vector<std::string> ParameterWatch::find_new() {
  size_t next = 0;
  if (walk_matches(root_, tensors_, next) && next == tensors_.size()) return {};
  std::vector<const void*> now;
  collect(root_, now);
  const std::unordered_set<const void*> before(tensors_.begin(), tensors_.end());
  tensors_ = std::move(now);
  std::vector<std::string> found;
  for (const auto& p : root_.named_parameters()) {
    if (!known_.insert(p.key()).second || ignored_.count(p.key())) continue;
    const bool is_tied = before.count(p.value().unsafeGetTensorImpl()) > 0;
    if (p.value().defined() && p.value().requires_grad() && !is_tied) found.push_back(p.key());
  }
  return found;
}

void StrayTensors::begin_backward() {
  stepped_.clear();
  for (auto& stray : strays_) {
    auto impl = stray.tensor.lock();
    if (!impl) continue;
    const auto tensor = at::Tensor::wrap_tensor_impl(std::move(impl));
    if (value_sample(tensor) == stray.sample) continue;
    // A sum, because the ranks' graphs list their leaves in different orders.
    stepped_[ddp::str(tensor.sizes(), " ", tensor.scalar_type())] += hash_of({tensor});
  }
  strays_.clear();
  if (passes_ < kStrayPasses) collect();
}

void StrayTensors::compare(const ProcessGroup& group, GroupMonitor& monitor) {
  std::vector<std::string> mine;
  for (const auto& [kind, hash] : stepped_) {
    mine.push_back(kind);
    mine.push_back(std::to_string(hash));
  }
  const auto by_rank = gather_strings(
      packed(mine), group, "comparing tensors that an optimizer steps and no wrapper averages",
      &monitor);
  std::string differing;
  for (size_t i = 0; i < mine.size() && differing.empty(); i += 2) {
    for (const auto& text : by_rank) {
      const auto of_rank = unpacked(text);
      const auto found = std::find(of_rank.begin(), of_rank.end(), mine[i]);
      if (found == of_rank.end() || *(found + 1) != mine[i + 1]) differing = mine[i];
    }
  }
  stepped_.clear();
  if (differing.empty()) return;
  strays_.clear();
  passes_ = kStrayPasses;
  TORCH_WARN(
      "DistributedDataParallel: expected an optimizer to step what is averaged, got a step of a "
      "tensor of no wrapped module, ",
      differing, ", on gradients of ", monitor.rank_text(),
      " alone, so the ranks' values drift apart. Call model->also_average({tensor}) after "
      "wrapping, unless the program averages it itself or each rank is to have its own.");
}

void StrayTensors::collect() {
  ++passes_;
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (!nodes) return;
  std::unordered_set<const void*> known;
  for (const auto& p : module_->parameters()) known.insert(p.unsafeGetTensorImpl());
  for (const auto* node : *nodes) {
    const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node);
    if (!leaf || is_averaged(*leaf)) continue;
    const auto& tensor = leaf->variable;
    if (!known.count(tensor.unsafeGetTensorImpl())) {
      strays_.push_back({WeakTensor(tensor.getIntrusivePtr()), value_sample(tensor)});
    }
  }
}

}  // namespace ddp
