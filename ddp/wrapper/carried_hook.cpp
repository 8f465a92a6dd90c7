#include <ddp/internal/carried_hook.h>

#include <torch/csrc/autograd/variable.h>

namespace ddp {

void carry_hooks(const torch::nn::Module& from, const torch::nn::Module& to) {
  namespace impl = torch::autograd::impl;
  const auto copies = to.named_parameters();
  for (const auto& item : from.named_parameters()) {
    const auto* copy = copies.find(item.key());
    if (copy == nullptr || !item.value().defined()) continue;
    for (const auto& hook : impl::hooks(item.value())) {
      const auto* carried = dynamic_cast<const CarriedHook*>(hook.get());
      if (carried != nullptr) impl::add_hook(*copy, carried->copy());
    }
  }
}

}  // namespace ddp
