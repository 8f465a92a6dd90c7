#include "wrapper/optimizer_in_backward.h"

#include <c10/util/ScopeExit.h>
#include <ddp/internal/check.h>
#include <ddp/internal/optimizer_kinds.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/value_sample.h>
#include <ddp/zero.h>

namespace ddp {
namespace {

thread_local bool steps_in_backward = false;

}  // namespace

bool OptimizerInBackward::is_stepping() { return steps_in_backward; }

OptimizerInBackward::OptimizerInBackward(
    std::shared_ptr<torch::optim::Optimizer> optimizer, const std::vector<at::Tensor>& reduced)
    : optimizer_(std::move(optimizer)) {
  constexpr const char* kSubject = "step_in_backward: ";
  DDP_CHECK_VALUE(optimizer_, kSubject, "expected an optimizer, got none.");
  DDP_CHECK_VALUE(
      steps_each_parameter(*optimizer_), kSubject,
      "expected an optimizer that updates each parameter on its own, got LBFGS. Call its step() "
      "instead, with a closure that returns the loss averaged over the ranks.");
  // Its step() takes its part of all parameters, whatever the groups have.
  DDP_CHECK_VALUE(
      dynamic_cast<const ZeroRedundancyOptimizerBase*>(optimizer_.get()) == nullptr, kSubject,
      "expected an optimizer that steps the parameters of one bucket, got a "
      "ZeroRedundancyOptimizer, which steps its part of all. Set overlap(true) there, which steps "
      "each bucket in backward, and leave step_in_backward() out.");
  for (const auto& p : reduced) reduced_.insert(p.unsafeGetTensorImpl());
  DDP_CHECK_VALUE(
      any_of(
          optimizer_->param_groups(),
          [&](const auto& group) {
            return any_of(group.params(), [&](const auto& p) {
              return reduced_.count(p.unsafeGetTensorImpl()) > 0;
            });
          }),
      kSubject, "expected an optimizer of this model's parameters, got one that has none of them.");
}

// Reads the optimizer's groups each time: parameters may be added while training.
void OptimizerInBackward::step(const std::vector<at::Tensor>& part, bool last) {
  if (std::exchange(is_first_part_, last)) warn_of_second_step();
  std::unordered_set<const void*> wanted;
  for (const auto& p : part) wanted.insert(p.unsafeGetTensorImpl());
  std::vector<std::vector<at::Tensor>> selected;
  for (const auto& group : optimizer_->param_groups()) {
    auto& of_group = selected.emplace_back();
    for (const auto& p : group.params()) {
      const void* id = p.unsafeGetTensorImpl();
      if (wanted.count(id) > 0 || (last && reduced_.count(id) == 0)) of_group.push_back(p);
    }
  }
  const auto exchange = [&] {
    auto& groups = optimizer_->param_groups();
    for (size_t g = 0; g < groups.size(); ++g) std::swap(groups[g].params(), selected[g]);
  };
  exchange();
  const bool was_stepping = std::exchange(steps_in_backward, true);
  const auto put_back = c10::make_scope_exit([&] {
    steps_in_backward = was_stepping;
    exchange();
  });
  optimizer_->step();
  for (const auto& p : part) {
    if (p.grad().defined()) stepped_.emplace_back(p, value_sample(p));
  }
}

// A leftover optimizer->step() after backward changes most of the parameters that were stepped
// here, in every pass. A clamp of weights changes few, and copies into the model are rare.
void OptimizerInBackward::warn_of_second_step() {
  size_t changed = 0;
  for (const auto& [parameter, sample] : stepped_) changed += value_sample(parameter) != sample;
  const bool most = changed > 0 && changed * 2 >= stepped_.size();
  stepped_.clear();
  changed_passes_ = most ? changed_passes_ + 1 : 0;
  if (changed_passes_ < 2) return;
  TORCH_WARN_ONCE(
      "step_in_backward: expected parameters to stay as they were stepped until the next backward "
      "pass, got others, twice in succession. Leave out optimizer->step(): backward has done it, "
      "and a second call steps twice.");
}

}  // namespace ddp
