#include "sharded/passes/unit_nodes.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

namespace ddp {
namespace {

using torch::autograd::variable_list;

class UnitNode : public torch::autograd::Node {
 public:
  UnitNode(
      torch::autograd::edge_list edges, UnitEnd end, std::shared_ptr<ShardedUnit> unit,
      ShardedModel::Place place)
      : end_(end), unit_(std::move(unit)), place_(std::move(place)) {
    set_next_edges(std::move(edges));
  }

  std::string name() const override {
    return end_ == UnitEnd::Outputs ? "ddp::UnitOutputs" : "ddp::UnitInputs";
  }
  const std::shared_ptr<ForwardPass>& pass() const { return place_.pass; }

 protected:
  variable_list apply(variable_list&& gradients) override {
    DDP_CHECK(
        !c10::GradMode::is_enabled(),
        "FullyShardedDataParallel: expected a backward without create_graph, got one with it on "
        "rank ",
        unit_->groups().shard->getRank(), ". Second derivatives need parameters that were freed.");
    const auto model = unit_->model();
    end_ == UnitEnd::Outputs ? model->on_entry(place_, *unit_) : model->on_exit(place_, *unit_);
    const bool is_freed = !torch::autograd::get_current_graph_task_keep_graph();
    if (is_freed && !place_.is_recomputed) place_.pass->is_released = true;
    gradients.resize(num_outputs());  // none for a marker
    return std::move(gradients);
  }

 private:
  const UnitEnd end_;
  const std::shared_ptr<ShardedUnit> unit_;
  const ShardedModel::Place place_;
};

NodePtr marker(
    torch::autograd::edge_list edges, UnitEnd end, const std::shared_ptr<ShardedUnit>& unit,
    const ShardedModel::Place& place) {
  auto node = make_node<UnitNode>(std::move(edges), end, unit, place);
  // Autograd orders the nodes of one device alone.
  node->add_input_metadata(at::empty({0}, at::dtype(at::kFloat).device(unit->device())));
  return node;
}

bool has_graph(const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }

/// Whether the use's graph ends with a call that backward repeats.
bool is_repeated(const ShardedModel::Place& place) {
  return place.pass && !place.is_recomputed && place.pass->order.use(place.use).call != 0;
}

}  // namespace

NodePtr begin_marker(const std::shared_ptr<ShardedUnit>& root, const ShardedModel::Place& place) {
  return marker({}, UnitEnd::Inputs, root, place);
}

NodePtr exit_marker(
    const std::shared_ptr<ShardedUnit>& unit, const ShardedModel::Place& place,
    const NodePtr& before) {
  return marker({torch::autograd::Edge(before, 0)}, UnitEnd::Outputs, unit, place);
}

std::vector<at::Tensor> pass_through_node(
    std::vector<at::Tensor> tensors, UnitEnd end, const std::shared_ptr<ShardedUnit>& unit,
    const ShardedModel::Place& place, const NodePtr& marker) {
  std::vector<at::Tensor> inputs;
  std::copy_if(tensors.begin(), tensors.end(), std::back_inserter(inputs), has_graph);
  if (inputs.empty() || !c10::GradMode::is_enabled() || is_repeated(place)) return tensors;
  auto edges = torch::autograd::collect_next_edges(inputs);
  if (marker) edges.emplace_back(marker, 0);
  const auto node = make_node<UnitNode>(std::move(edges), end, unit, place);
  if (place.pass && !place.is_recomputed) place.pass->has_graph = true;
  for (auto& tensor : tensors) {
    if (!has_graph(tensor)) continue;
    auto alias = tensor.detach();
    torch::autograd::set_history(alias, node);
    tensor = std::move(alias);
  }
  return tensors;
}

std::vector<std::shared_ptr<ForwardPass>> passes_of(const torch::autograd::edge_list& roots) {
  std::vector<std::shared_ptr<ForwardPass>> passes;
  std::unordered_set<torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> open;
  const auto visit = [&](torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  for (const auto& root : roots) visit(root.function.get());
  while (!open.empty()) {
    auto* node = open.back();
    open.pop_back();
    if (auto* of_unit = dynamic_cast<UnitNode*>(node)) {
      const auto& pass = of_unit->pass();
      if (pass && !contains(passes, pass)) passes.push_back(pass);
    }
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  return passes;
}

std::vector<std::shared_ptr<ForwardPass>> passes_of(
    const std::vector<at::Tensor>& tensors, const ShardedModel& model) {
  torch::autograd::edge_list roots;
  for (const auto& tensor : tensors) {
    if (tensor.defined()) roots.emplace_back(tensor.grad_fn(), 0);
  }
  auto passes = passes_of(roots);
  drop_if(passes, [&](const auto& pass) { return pass->model.get() != &model; });
  return passes;
}

}  // namespace ddp
