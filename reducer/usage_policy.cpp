#include "usage_policy.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "graph_search.h"

namespace ddp {
namespace {

constexpr const char* kUnused = "not used in forward";
constexpr const char* kLeftOut = "its output is not in the loss";

/// find_unused_parameters: what the outputs do not lead to is unused in that pass.
class FindUnused : public UsagePolicy {
 public:
  FindUnused(
      const std::vector<NamedParameter>& parameters, const std::vector<NodePtr>& accumulators)
      : UsagePolicy(parameters, accumulators), search_(accumulators) {}

  bool tracks_usage() const override { return true; }
  void accumulators_changed() override { search_ = GraphSearch(accumulators_); }

  // Gradients that no search foretold to be missing turn out to be missing at the end.
  std::vector<Problem> check(const BackwardPass& pass) override { return check_detached(pass); }

 protected:
  void foresee(const std::vector<torch::autograd::Node*>& outputs, BackwardPass& pass) override {
    const auto& reachable = search_.reachable(outputs);
    if (std::find(reachable.begin(), reachable.end(), 0) == reachable.end()) {
      TORCH_WARN_ONCE(
          "find_unused_parameters is set, but the outputs of this forward pass lead to every "
          "parameter. The search costs a little in each iteration, and the buckets keep the order "
          "of registration: leave it out unless other iterations skip parameters.");
    }
    for (size_t i = 0; i < reachable.size(); ++i) {
      if (!reachable[i]) pass.mark_unused(i);
    }
  }

 private:
  GraphSearch search_;
};

/// static_graph: the first pass counts gradients, and every later one has to bring as many. Each
/// rank's set of used parameters is its own; the buckets are the same all the same.
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
        {c10::str(
             "Your training graph has changed in this iteration: ", parameters_[parameter].name,
             " got gradient number ", slot.fired, ", after ", slot.expected,
             " in the first iteration"),
         "This is not compatible with static_graph set to true."}};
  }

 protected:
  std::string remedy_of_missing(bool /*all_unused*/, bool /*all_left_out*/) const override {
    return "They had some in the first iteration, and static_graph set to true needs the same "
           "graph in each.";
  }

 private:
  bool counted_ = false;  // this rank's first pass was
};

}  // namespace

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
  // Two forwards may share one backward: what one of them does not reach the other may.
  if (alone && outcome.outputs_complete) foresee(nodes, pass);
}

void UsagePolicy::clear_used() { std::fill(used_.begin(), used_.end(), 0); }

bool UsagePolicy::forget_discarded_gradients() {
  const auto is_set = [](char used) { return used != 0; };
  const auto has_gradient = [](const auto& p) { return p.tensor.grad().defined(); };
  if (std::none_of(used_.begin(), used_.end(), is_set) ||
      std::any_of(parameters_.begin(), parameters_.end(), has_gradient)) {
    return false;
  }
  clear_used();
  return true;
}

std::vector<Problem> UsagePolicy::check(const BackwardPass& pass) { return check_missing(pass); }

std::vector<Problem> UsagePolicy::check_extra(size_t parameter, const BackwardPass& pass) const {
  const auto& slot = pass.slots()[parameter];
  const auto& name = parameters_[parameter].name;
  if (slot.fired > 1) {
    return {
        {c10::str("the gradient of ", name, " became ready twice in one backward pass"),
         "Use a parameter in only one of the backward passes that are nested in each other, or set "
         "static_graph(true) if every iteration does the same."}};
  }
  if (slot.bucket >= pass.next_bucket) return {};
  return {
      {c10::str(
           "the gradient of ", name,
           " came although forward's outputs do not lead to it, when its bucket was sent already"),
       "Return from forward everything that the loss is made of."}};
}

// Why the gradient of a parameter does not come to its hook any more; "" when it could.
std::string UsagePolicy::why_detached(size_t parameter) const {
  const auto& tensor = parameters_[parameter].tensor;
  // Autograd gives a parameter a new accumulator when its data changes its type or device.
  if (torch::autograd::impl::try_get_grad_accumulator(tensor) != accumulators_[parameter]) {
    return c10::str(
        "moved to ", tensor.scalar_type(), " on ", tensor.device(),
        " after the module was wrapped; wrap it again");
  }
  return explain_ ? explain_(parameters_[parameter]) : std::string();
}

std::string UsagePolicy::why_missing(size_t parameter, const std::vector<char>& reached) const {
  const auto detached = why_detached(parameter);
  if (!detached.empty() || reached.empty()) return detached;
  return reached[parameter] ? kLeftOut : kUnused;
}

std::string UsagePolicy::remedy_of_missing(bool all_unused, bool all_left_out) const {
  if (all_left_out) {
    return "Use every output of forward in the loss, or set find_unused_parameters(true).";
  }
  if (all_unused) return "If a forward pass may skip parameters, set find_unused_parameters(true).";
  return "If a forward pass may skip parameters, set find_unused_parameters(true); if not, check "
         "that the loss uses every output.";
}

std::vector<Problem> UsagePolicy::check_missing(const BackwardPass& pass) const {
  if (pass.is_complete()) return {};
  std::vector<char> reached;  // by parameter, from the outputs; empty when they are not known
  const auto nodes = outputs_.nodes();
  if (!nodes.empty()) {
    std::vector<torch::autograd::Node*> roots;
    for (const auto& node : nodes) roots.push_back(node.get());
    reached = GraphSearch(accumulators_).reachable(roots);
  }
  std::vector<std::string> missing;
  bool all_unused = true, all_left_out = true;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (pass.slots()[i].ready) continue;
    // Names beyond those that are listed need no reason, which takes a look at the whole module.
    const auto why = missing.size() < kMostNames ? why_missing(i, reached) : std::string();
    all_unused = all_unused && why == kUnused;
    all_left_out = all_left_out && why == kLeftOut;
    missing.push_back(parameters_[i].name + (why.empty() ? "" : ": " + why));
  }
  if (missing.empty()) return {};
  return {
      {c10::str(
           "backward ended without gradients for ", missing.size(), " of ", parameters_.size(),
           " parameters (", join_names(missing), ")"),
       remedy_of_missing(all_unused, all_left_out)}};
}

// Where parameters may be without gradient, one that can get none any more would go unnoticed.
std::vector<Problem> UsagePolicy::check_detached(const BackwardPass& pass) {
  std::vector<Problem> problems;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    // Frozen is a way of being unused.
    if (pass.slots()[i].fired > 0 || !parameters_[i].tensor.requires_grad()) continue;
    if (std::exchange(known_unused_[i], 1)) continue;
    const auto why = why_detached(i);
    if (why.empty()) continue;
    problems.push_back(
        {c10::str("the gradient of ", parameters_[i].name, " is not averaged: it was ", why),
         "Until then the ranks' models drift apart."});
  }
  return problems;
}

}  // namespace ddp
