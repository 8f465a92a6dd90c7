#include "autograd/usage_policy.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "autograd/graph_search.h"

namespace ddp {
namespace {

constexpr const char* kUnused = "not used in forward";
constexpr const char* kLeftOut = "did not contribute to this loss";
// Passes in a row with all gradients, after which a warning calls the search needless.
constexpr int kFullPasses = 10;

/// find_unused_parameters: a parameter that the outputs do not lead to is unused in that pass.
class FindUnused : public UsagePolicy {
 public:
  FindUnused(
      const std::vector<NamedParameter>& parameters, const std::vector<NodePtr>& accumulators)
      : UsagePolicy(parameters, accumulators), search_(accumulators) {}

  bool tracks_usage() const override { return true; }
  void accumulators_changed() override { search_ = GraphSearch(accumulators_); }

  // A gradient may be missing although the search found a path to its parameter: that is no error.
  std::vector<Problem> check(const BackwardPass& pass) override { return check_detached(pass); }

  void end_pass(const BackwardPass& pass) override {
    if (full_passes_ == kFullPasses) return;
    const auto has_gradient = [](const auto& slot) { return slot.fired > 0; };
    const bool full = all_of(pass.slots(), has_gradient);
    full_passes_ = full ? full_passes_ + 1 : 0;
    if (full_passes_ < kFullPasses) return;
    TORCH_WARN_ONCE(
        "find_unused_parameters is set, but every parameter had a gradient in the last ",
        kFullPasses,
        " backward passes. The search costs a little in each iteration, and the buckets keep the "
        "order of registration: leave it out unless other iterations skip parameters.");
  }

 protected:
  void mark_unreachable(
      const std::vector<torch::autograd::Node*>& outputs, BackwardPass& pass) override {
    const auto& reachable = search_.reachable(outputs);
    for (size_t i = 0; i < reachable.size(); ++i) {
      if (!reachable[i] && !parameters_[i].is_outside) pass.mark_unused(i);
    }
  }

 private:
  GraphSearch search_;
  int full_passes_ = 0;  // in a row
};

/// static_graph: the first pass counts gradients, and every later one must make as many. The sets
/// of used parameters may differ between ranks; the buckets are the same on all.
class StaticGraph : public UsagePolicy {
 public:
  using UsagePolicy::UsagePolicy;

  bool tracks_usage() const override { return true; }
  bool is_counting() const override { return !counted_; }

  std::vector<Problem> check(const BackwardPass& pass) override {
    return is_counting() ? check_detached(pass) : check_missing(pass);
  }

  void end_pass(const BackwardPass& pass) override {
    if (std::exchange(counted_, true)) return;
    for (size_t i = 0; i < expected_.size(); ++i) expected_[i] = pass.slots()[i].fired;
  }

  std::vector<Problem> check_extra(size_t parameter, const BackwardPass& pass) const override {
    const auto& slot = pass.slots()[parameter];
    return {
        {"Your training graph has changed in this iteration",
         "This is not compatible with static_graph set to true.",
         {parameters_[parameter].name},
         ddp::str(
             "gradient number ", slot.fired, ", after ", slot.expected,
             " in the first iteration")}};
  }

 protected:
  std::string remedy_of_missing(const std::string& /*why*/) const override {
    return "They had some in the first iteration, and static_graph set to true needs the same "
           "graph in each.";
  }

 private:
  bool counted_ = false;  // this rank's first pass has ended, and set expected_
};

}  // namespace

void ForwardOutputs::clear() {
  complete_ = true;
  nodes_.clear();
}

std::vector<torch::autograd::Node*> ForwardOutputs::add(
    const std::vector<at::Tensor>& outputs, bool complete) {
  // Outputs of forwards that never have a backward pass would accumulate.
  drop_if(nodes_, [](const auto& node) { return node.expired(); });
  complete_ = complete_ && complete;
  std::vector<Node*> added;
  for (const auto& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    complete_ = complete_ && output.grad_fn();
    const auto node = torch::autograd::impl::gradient_edge(output).function;
    nodes_.push_back(WeakNodePtr(node));
    added.push_back(node.get());
  }
  return added;
}

bool ForwardOutputs::are_in_backward() const {
  const auto* running = torch::autograd::get_current_graph_task_nodes_in_graph();
  return running && any_of(nodes_, [&](const auto& node) {
           const auto alive = node.lock();
           return alive && running->count(alive.get()) > 0;
         });
}

std::vector<NodePtr> ForwardOutputs::nodes() const {
  std::vector<NodePtr> alive;
  for (const auto& node : nodes_) {
    alive.push_back(node.lock());
    if (!complete_ || !alive.back()) return {};
  }
  return alive;
}

std::unique_ptr<UsagePolicy> UsagePolicy::make(
    const ReducerOptions& options, const std::vector<NamedParameter>& parameters,
    const std::vector<NodePtr>& accumulators) {
  if (options.static_graph()) return std::make_unique<StaticGraph>(parameters, accumulators);
  if (options.find_unused_parameters()) {
    return std::make_unique<FindUnused>(parameters, accumulators);
  }
  return std::make_unique<UsagePolicy>(parameters, accumulators);
}

UsagePolicy::UsagePolicy(
    const std::vector<NamedParameter>& parameters, const std::vector<NodePtr>& accumulators)
    : parameters_(parameters),
      accumulators_(accumulators),
      expected_(parameters.size(), 1),
      used_(parameters.size(), 0),
      known_unused_(parameters.size(), 0) {}

void UsagePolicy::add_forward(const ForwardOutcome& outcome, bool alone, BackwardPass& pass) {
  if (alone) outputs_.clear();
  const auto nodes = outputs_.add(outcome.outputs, outcome.outputs_complete);
  // Two forwards may share one backward: the other one may use the parameters that this one skips.
  if (alone && outcome.outputs_complete) mark_unreachable(nodes, pass);
}

void UsagePolicy::compare_passes() {
  if (used_first_.empty()) used_first_ = used_;
  is_alike_ = is_alike_ && used_ == used_first_;
}

void UsagePolicy::clear_used() { std::fill(used_.begin(), used_.end(), 0); }

bool UsagePolicy::clear_usage_of_zeroed_grads() {
  const auto is_set = [](char used) { return used != 0; };
  const auto has_gradient = [](const auto& p) { return p.tensor.grad().defined(); };
  if (none_of(used_, is_set) || any_of(parameters_, has_gradient)) return false;
  clear_used();
  return true;
}

std::vector<Problem> UsagePolicy::check(const BackwardPass& pass) { return check_missing(pass); }

std::vector<Problem> UsagePolicy::check_extra(size_t parameter, const BackwardPass& pass) const {
  const auto& slot = pass.slots()[parameter];
  const auto& name = parameters_[parameter].name;
  if (slot.fired > 1) {
    return {
        {"a gradient became ready twice in one backward pass",
         "Use a parameter in only one of the backward passes that are nested in each other, or set "
         "static_graph(true) if every iteration does the same.",
         {name},
         ""}};
  }
  if (slot.bucket >= pass.next_bucket) return {};
  return {
      {"a gradient came although forward's outputs do not lead there, when its bucket was sent "
       "already,",
       "Return from forward everything that the loss is made of.",
       {name},
       ""}};
}

// The reasons why gradients of parameters no longer reach their hooks; empty where they do.
std::vector<MissingGradient> UsagePolicy::why_detached(
    const std::vector<size_t>& parameters) const {
  auto reasons = explain_ ? explain_(parameters) : std::vector<MissingGradient>(parameters.size());
  for (size_t k = 0; k < parameters.size(); ++k) {
    const auto& tensor = parameters_[parameters[k]].tensor;
    const auto mine = accumulators_[parameters[k]]->input_metadata(0).options();
    if (mine.dtype() == tensor.dtype() && mine.device() == tensor.device()) continue;
    reasons[k] = {
        ddp::str(
            "moved to ", tensor.scalar_type(), " on ", tensor.device(),
            " after the module was wrapped"),
        "Move the module before wrapping it, or call model->refresh() on every rank."};
  }
  return reasons;
}

std::string UsagePolicy::remedy_of_missing(const std::string& why) const {
  if (why == kLeftOut) {
    return "Use every output of forward in the loss, or set find_unused_parameters(true).";
  }
  if (why == kUnused) {
    return "If a forward pass may skip parameters, set find_unused_parameters(true).";
  }
  return "If a forward pass may skip parameters, set find_unused_parameters(true); if not, check "
         "that the loss uses every output. The results of ddp::all_gather carry no gradient; those "
         "of ddp::functional::all_gather do.";
}

// By parameter, whether the outputs lead to it; empty when they are not known.
std::vector<char> UsagePolicy::reached_parameters() const {
  const auto nodes = outputs_.nodes();
  if (nodes.empty()) return {};
  std::vector<torch::autograd::Node*> roots;
  for (const auto& node : nodes) roots.push_back(node.get());
  return GraphSearch(accumulators_).reachable(roots);
}

std::vector<Problem> UsagePolicy::check_missing(const BackwardPass& pass) const {
  if (pass.is_complete()) return {};
  std::vector<size_t> missing;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!pass.slots()[i].ready) missing.push_back(i);
  }
  const auto reached = reached_parameters();
  auto reasons = why_detached(missing);
  std::vector<Problem> problems;
  for (size_t k = 0; k < missing.size(); ++k) {
    auto& [why, remedy] = reasons[k];
    if (why.empty() && parameters_[missing[k]].is_outside) {
      why = kLeftOut;
      remedy =
          "Add the losses and run one backward pass: a backward pass of a loss of its own is not "
          "averaged. For a tensor that some losses leave out, set find_unused_parameters(true).";
    }
    if (why.empty() && !reached.empty()) why = reached[missing[k]] ? kLeftOut : kUnused;
    if (remedy.empty()) remedy = remedy_of_missing(why);
    add_problem(
        problems, {"backward ended without gradients",
                   std::move(remedy),
                   {parameters_[missing[k]].name},
                   std::move(why)});
  }
  return problems;
}

// Where a missing gradient is no error, a parameter whose gradients no longer reach the reducer
// would silently not be averaged.
std::vector<Problem> UsagePolicy::check_detached(const BackwardPass& pass) {
  std::vector<size_t> unused;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    // A frozen parameter counts as unused.
    if (pass.slots()[i].fired > 0 || !parameters_[i].tensor.requires_grad()) continue;
    if (!std::exchange(known_unused_[i], 1)) unused.push_back(i);
  }
  if (unused.empty()) return {};
  auto reasons = why_detached(unused);
  std::vector<Problem> problems;
  for (size_t k = 0; k < unused.size(); ++k) {
    if (reasons[k].why.empty()) continue;
    add_problem(
        problems, {"gradients are not averaged",
                   std::move(reasons[k].remedy),
                   {parameters_[unused[k]].name},
                   std::move(reasons[k].why)});
  }
  return problems;
}

}  // namespace ddp
