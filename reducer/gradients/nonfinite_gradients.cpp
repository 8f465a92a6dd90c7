#include "gradients/nonfinite_gradients.h"

#include <limits>
#include <utility>

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ddp/internal/as_real.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

at::Tensor numbers_of(const at::Tensor& gradient) {
  return as_real(gradient.layout() == at::kSparse ? gradient._values() : gradient);
}

}  // namespace

void NonfiniteGradients::clear() {
  on_host_.clear();
  queued_.clear();
}

// The largest magnitude, unlike a sum, does not overflow where all numbers are finite.
void NonfiniteGradients::search(const Bucket& bucket, const std::vector<char>* used) {
  Queued queued;
  std::vector<at::Tensor> numbers;
  const auto gradients = bucket.packed_gradients();
  for (size_t slot = 0; slot < gradients.size(); ++slot) {
    const auto parameter = bucket.indices()[slot];
    if (!gradients[slot].defined() || (used != nullptr && !(*used)[parameter])) continue;
    auto own = numbers_of(gradients[slot]);
    if (own.numel() == 0) continue;
    queued.parameters.push_back(parameter);
    numbers.push_back(std::move(own));
  }
  if (numbers.empty()) return;
  queued.largest = at::stack(at::_foreach_norm(numbers, std::numeric_limits<double>::infinity()));
  queued_.push_back(std::move(queued));
}

at::Tensor NonfiniteGradients::device_flag(const at::Tensor& like) const {
  at::Tensor flag;
  for (const auto& queued : queued_) {
    const auto found = at::isfinite(queued.largest).all().logical_not();
    // The host would read its copy at once.
    const auto number = found.to(like.options(), /*non_blocking=*/!like.is_cpu());
    flag = flag.defined() ? flag.maximum(number) : number;
  }
  return flag;
}

std::optional<Problem> NonfiniteGradients::problem(
    int64_t pass, const std::vector<NamedParameter>& parameters) const {
  auto found = on_host_;
  for (const auto& queued : queued_) {
    const auto finite = at::isfinite(queued.largest).cpu();
    const auto* is_finite = finite.const_data_ptr<bool>();
    for (size_t i = 0; i < queued.parameters.size(); ++i) {
      if (!is_finite[i]) found.push_back(queued.parameters[i]);
    }
  }
  if (found.empty()) return {};
  auto what = ddp::str(
      "expected finite gradients in backward pass ", pass, ", got inf or NaN, first for \"",
      parameters[found.front()].name, "\"");
  if (found.size() > 1) {
    what += ddp::str(" and then for ", found.size() - 1, " more of ", parameters.size());
  }
  return Problem{
      std::move(what),
      "Look at the batch and the loss of this rank: find_nonfinite_output() names the first "
      "operator of a forward pass whose result is not finite."};
}

}  // namespace ddp
