#include "checks/stray_tensors.h"

#include <unordered_set>

#include <ddp/internal/reducer.h>
#include <ddp/internal/text.h>
#include <ddp/internal/value_sample.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

namespace ddp {
namespace {

// More than one: a tensor may enter the loss late, and an optimizer may skip steps.
constexpr int kPasses = 3;

}  // namespace

void StrayTensors::warn_of_stepped(const GroupMonitor& monitor) {
  const auto tensor = find_stepped();
  if (tensor.empty()) return;
  TORCH_WARN(
      "DistributedDataParallel: expected an optimizer to step what is averaged, got a step of a "
      "tensor of no wrapped module, ",
      tensor, ", on gradients of ", monitor.rank_text(),
      " alone, so the ranks' values drift apart. Call model->also_average({tensor}) after "
      "wrapping, unless the program averages it itself or each rank is to have its own.");
}

std::string StrayTensors::find_stepped() {
  std::string found;
  for (auto& stray : strays_) {
    auto impl = stray.tensor.lock();
    if (!impl) continue;
    const auto tensor = at::Tensor::wrap_tensor_impl(std::move(impl));
    if (value_sample(tensor) == stray.sample) continue;
    found = ddp::str(tensor.sizes(), " ", tensor.scalar_type());
    break;
  }
  strays_.clear();
  if (!found.empty()) passes_ = kPasses;
  if (passes_ < kPasses) collect();
  return found;
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
