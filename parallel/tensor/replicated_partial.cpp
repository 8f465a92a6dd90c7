#include "tensor/replicated_partial.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <ddp/internal/carried_hook.h>
#include <ddp/parallel_linear.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include "functional/region.h"

namespace ddp {
namespace {

using torch::autograd::variable_list;

/// Runs on the sum of a leaf's gradients, before that is added to `.grad`.
class SumOverGroup : public CarriedHook {
 public:
  explicit SumOverGroup(ProcessGroup group) : group_(std::move(group)) {}

  variable_list operator()(const variable_list& gradients) override {
    auto summed = gradients;
    if (summed[0].defined()) summed[0] = functional::apply_exchange(summed[0], exchange());
    return summed;
  }

  std::unique_ptr<FunctionPreHook> copy() const override {
    return std::make_unique<SumOverGroup>(group_);
  }

  const ProcessGroup& group() const { return group_; }

 private:
  c10::intrusive_ptr<functional::Exchange> exchange() const {
    using functional::Exchange;
    return c10::make_intrusive<Exchange>(Exchange::Kind::kSum, group_);
  }

  const ProcessGroup group_;
};

}  // namespace

void sum_gradient_over(const at::Tensor& parameter, const ProcessGroup& group) {
  if (group->getSize() == 1) return;
  const auto& hooks = torch::autograd::impl::hooks(parameter);
  const bool is_marked = std::any_of(hooks.begin(), hooks.end(), [&](const auto& hook) {
    const auto* sum = dynamic_cast<const SumOverGroup*>(hook.get());
    return sum != nullptr && sum->group() == group;
  });
  if (is_marked) return;
  torch::autograd::impl::add_hook(parameter, std::make_unique<SumOverGroup>(group));
}

void mark_replicated_partial(torch::nn::Module& module, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  for (const auto& parameter : module.parameters()) sum_gradient_over(parameter, group);
}

}  // namespace ddp
