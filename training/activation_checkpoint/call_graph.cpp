#include "call_graph.h"

#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>

#include <c10/util/FunctionRef.h>
#include <ddp/internal/check.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/variable.h>

namespace ddp {
namespace {

using torch::autograd::CreationMeta;
using torch::autograd::DifferentiableViewMeta;
using torch::autograd::Node;

bool is_made_since(const Node& node, const Node& other) {
  return other.thread_id() == node.thread_id() && other.sequence_nr() > node.sequence_nr();
}

/// Visits each node of the graph of `outputs` once, and goes on below those for which `visit` is
/// true.
void walk(const std::vector<at::Tensor>& outputs, c10::function_ref<bool(Node&)> visit) {
  std::unordered_set<Node*> seen;
  std::vector<Node*> open;
  const auto note = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  for (const auto& output : outputs) {
    if (output.defined()) note(output.grad_fn().get());
  }
  while (!open.empty()) {
    auto* node = open.back();
    open.pop_back();
    if (!visit(*node)) continue;
    for (const auto& edge : node->next_edges()) note(edge.function.get());
  }
}

template <typename BatchNorm>
void note_statistics(const Node& node, std::vector<at::Tensor>& found) {
  const auto* norm = dynamic_cast<const BatchNorm*>(&node);
  if (norm == nullptr || !norm->training) return;
  const auto mean = norm->running_mean_.unpack();
  // instance_norm() makes a tensor of its own for each call, and copies it back.
  constexpr size_t kOfNodeAndHere = 2;
  if (mean.defined() && mean.use_count() > kOfNodeAndHere) found.push_back(mean);
}

}  // namespace

bool has_graph_since(const Node& node, const at::Tensor& tensor) {
  const auto& function = tensor.grad_fn();
  return function && is_made_since(node, *function);
}

void move_to_node(const NodePtr& node, const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const auto* view = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (view != nullptr && view->has_bw_view()) {
    torch::autograd::ViewInfo of_base(at::Tensor(tensor._base()).detach(), nullptr, nullptr);
    impl->set_autograd_meta(std::make_unique<DifferentiableViewMeta>(
        impl, std::move(of_base), std::nullopt, /*shared_view_info=*/false,
        CreationMeta::IN_CUSTOM_FUNCTION));
  } else {
    impl->set_autograd_meta(nullptr);
  }
  torch::autograd::set_history(tensor, node);
}

std::vector<at::Tensor> moved_statistics(const std::vector<at::Tensor>& outputs, const Node& node) {
  std::vector<at::Tensor> found;
  walk(outputs, [&](Node& other) {
    if (!is_made_since(node, other)) return false;
    note_statistics<torch::autograd::generated::NativeBatchNormBackward0>(other, found);
    note_statistics<torch::autograd::generated::CudnnBatchNormBackward0>(other, found);
    note_statistics<torch::autograd::generated::MiopenBatchNormBackward0>(other, found);
    return true;
  });
  return found;
}

void check_leaves(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& known) {
  std::unordered_set<const c10::TensorImpl*> known_leaves;
  for (const auto& leaf : known) known_leaves.insert(leaf.unsafeGetTensorImpl());
  walk(outputs, [&](Node& node) {
    if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(&node)) {
      DDP_CHECK(
          known_leaves.count(leaf->variable.unsafeGetTensorImpl()) == 1,
          "checkpoint: expected a result that depends on the arguments and the named parameters, "
          "got one that depends on another tensor ",
          leaf->variable.sizes(),
          " that requires a gradient. Pass it as an argument, or name it in "
          "CheckpointOptions().parameters().");
    }
    return true;
  });
}

}  // namespace ddp
