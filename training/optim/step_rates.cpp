#include <ddp/detail/step_rates.h>

#include <ATen/ops/full.h>

namespace ddp::detail {

// Tensors that are there stay: an earlier graph reads them.
void StepRates::begin_capture(const Groups& groups) {
  for (size_t g = 0; g < groups.size(); ++g) {
    const double rate = groups[g].options().get_lr();
    for (const auto& p : groups[g].params()) {
      const auto [place, is_new] = tensors_.try_emplace({g, p.device().str()});
      if (!is_new) continue;
      const auto options = p.options().dtype(at::kFloat).requires_grad(false);
      place->second = {at::full({}, rate, options), rate};
    }
  }
  refresh(groups);
  is_capturing_ = true;
}

void StepRates::refresh(const Groups& groups) {
  for (auto& [place, rate] : tensors_) {
    const double current = groups.at(place.first).options().get_lr();
    if (rate.written == current) continue;
    rate.on_device.fill_(current);
    rate.written = current;
  }
}

}  // namespace ddp::detail
