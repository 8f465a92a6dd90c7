#include <ddp/detail/fused_step.h>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/full.h>

namespace ddp::detail {

std::vector<at::Tensor> StepCounts::advance(
    const std::vector<at::Tensor>& parameters, const CountOf& count_of) {
  refresh(count_of);
  std::vector<at::Tensor> counts;
  counts.reserve(parameters.size());
  for (const auto& p : parameters) {
    auto& entry = entries_[p.unsafeGetTensorImpl()];
    auto& count = *count_of(p.unsafeGetTensorImpl());
    if (!entry.on_device.defined() || entry.on_device.device() != p.device()) {
      entry.on_device = at::full({}, count, p.options().dtype(at::kFloat).requires_grad(false));
    } else if (entry.seen != count) {
      entry.on_device.fill_(count);
    }
    entry.seen = ++count;
    counts.push_back(entry.on_device);
  }
  if (!counts.empty()) at::_foreach_add_(counts, 1);
  return counts;
}

void StepCounts::take_back(
    const std::vector<at::Tensor>& parameters, const at::Tensor& found_inf,
    const CountOf& count_of) {
  std::vector<at::Tensor> counts;
  for (const auto& p : parameters) counts.push_back(entries_.at(p.unsafeGetTensorImpl()).on_device);
  at::_foreach_sub_(counts, std::vector<at::Tensor>(counts.size(), found_inf));
  if (!found_inf.is_cpu() || found_inf.item<float>() == 0) return;
  for (const auto& p : parameters) {
    entries_.at(p.unsafeGetTensorImpl()).seen = --*count_of(p.unsafeGetTensorImpl());
  }
}

void StepCounts::refresh(const CountOf& count_of) {
  if (std::exchange(are_of_states_, true)) return;
  for (auto& [parameter, entry] : entries_) {
    const auto* count = count_of(parameter);
    entry.seen = count == nullptr ? -1 : *count;
    if (count != nullptr) entry.on_device.fill_(*count);
  }
}

// Waits once: when the first count has arrived, the GPU has computed the others.
void StepCounts::sync(const CountOf& count_of) {
  if (!are_of_states_) return;
  for (auto& [parameter, entry] : entries_) {
    auto* count = count_of(parameter);
    if (count == nullptr || entry.seen != *count || entry.on_device.is_cpu()) continue;
    entry.seen = *count = static_cast<int64_t>(entry.on_device.item<float>());
  }
}

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
