#include "zero/gradient_sets.h"

#include <algorithm>

#include <ddp/internal/check.h>

namespace ddp {

void GradientSets::add(
    const ParameterLayout& layout, const std::vector<ProcessGroup>& groups,
    const at::Tensor& gradient) {
  auto set = std::find_if(sets_.begin(), sets_.end(), [&](const ShardedGradients& known) {
    return known.sharded_over == groups;
  });
  if (set == sets_.end()) set = sets_.insert(set, {{}, groups});
  if (!gradient.defined()) return;
  DDP_CHECK_VALUE(
      !layout.partial, "clip_grad_norm_: expected complete gradients, got a part of a sum of ",
      layout.name, ". Sum it over the ranks before.");
  set->gradients.push_back(gradient);
}

}  // namespace ddp
