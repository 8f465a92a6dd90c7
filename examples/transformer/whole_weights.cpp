#include "whole_weights.h"

#include <functional>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/collectives.h>
#include <ddp/parameter_layout.h>

namespace transformer {
namespace {

/// Calls `copy` with each of this rank's boxes of a parameter, and the same place in the whole one.
void for_each_box(
    const ddp::ParameterLayout& layout, const at::Tensor& whole,
    const std::function<void(const at::Tensor& own, const at::Tensor& place)>& copy) {
  int64_t begin = 0;
  for (const auto& box : layout.boxes) {
    auto place = whole;
    for (int64_t d = 0; d < whole.dim(); ++d) {
      const auto i = static_cast<size_t>(d);
      place = place.narrow(d, box.offset[i], box.size[i]);
    }
    copy(layout.local.view(-1).narrow(0, begin, place.numel()).view(place.sizes()), place);
    begin += place.numel();
  }
}

}  // namespace

void cut_weights(const LanguageModel& whole, const LanguageModel& net) {
  const c10::NoGradGuard no_grad;
  const auto values = whole->named_parameters();
  for (const auto& layout : ddp::layouts_of(*net)) {
    for_each_box(
        layout, values[layout.name], [](const auto& own, const auto& place) { own.copy_(place); });
  }
}

LanguageModel join_weights(const LanguageModel& net) {
  const c10::NoGradGuard no_grad;
  LanguageModel whole(net->vocabulary, net->shape);
  whole->to(net->device());
  auto values = whole->named_parameters();
  for (const auto& layout : ddp::layouts_of(*net)) {
    auto& value = values[layout.name];
    value.zero_();
    for_each_box(layout, value, [](const auto& own, const auto& place) { place.copy_(own); });
    // Each element is one rank's, and zero on the others.
    if (!layout.sharded_over.empty()) {
      auto sum = value.detach();
      ddp::all_reduce(sum, c10d::ReduceOp::SUM, net->groups.tp);
    }
  }
  return whole;
}

}  // namespace transformer
