#include "checks/parameter_watch.h"

#include <utility>

#include <ddp/internal/join_names.h>

namespace ddp {
namespace {

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

}  // namespace ddp
