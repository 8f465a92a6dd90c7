#include "cut_layers.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/functional.h>

namespace transformer {
namespace {

/// This rank's rows of a whole parameter; those after its last one are zeros.
at::Tensor own_rows(const at::Tensor& whole, const ddp::ProcessGroup& tp) {
  const c10::NoGradGuard no_grad;
  const int64_t rows = (whole.size(0) + tp->getSize() - 1) / tp->getSize();
  const int64_t begin = std::min(tp->getRank() * rows, whole.size(0));
  const int64_t count = std::min(rows, whole.size(0) - begin);
  auto sizes = whole.sizes().vec();
  sizes[0] = rows;
  auto own = at::zeros(sizes, whole.options());
  own.narrow(0, 0, count).copy_(whole.narrow(0, begin, count));
  return own;
}

/// Where own_rows() of a parameter with so many are in it. Padding is in no box.
ddp::ParameterLayout layout_of_rows(
    const char* name, const at::Tensor& own, int64_t whole_rows, const ddp::ProcessGroup& tp) {
  ddp::ParameterLayout layout;
  layout.name = name;
  layout.sizes = own.sizes().vec();
  layout.sizes[0] = whole_rows;
  layout.dtype = own.scalar_type();
  layout.local = own;
  layout.sharded_over = {tp};
  ddp::Box box{std::vector<int64_t>(layout.sizes.size(), 0), own.sizes().vec()};
  box.offset[0] = tp->getRank() * own.size(0);
  box.size[0] = std::min(own.size(0), whole_rows - box.offset[0]);
  if (box.size[0] > 0) layout.boxes.push_back(std::move(box));
  return layout;
}

}  // namespace

CutAttentionImpl::CutAttentionImpl(const ddp::ParallelMultiheadAttentionOptions& options)
    : attention(options) {
  register_parameter("in_proj_weight", attention->in_proj->weight);
  register_parameter("in_proj_bias", attention->in_proj->bias);
  register_module("out_proj", attention->out_proj);
}

void CutAttentionImpl::train(bool on) {
  Module::train(on);
  attention->train(on);
}

std::vector<ddp::ParameterLayout> CutAttentionImpl::layouts() {
  auto layouts = attention->in_proj->layouts();  // out_proj gives its own
  for (auto& layout : layouts) layout.name = "in_proj_" + layout.name;
  return layouts;
}

CutHeadImpl::CutHeadImpl(const torch::nn::Linear& whole, ddp::ProcessGroup group)
    : tp(std::move(group)),
      whole_rows(whole->weight.size(0)),
      weight(register_parameter("weight", own_rows(whole->weight, tp))),
      bias(register_parameter("bias", own_rows(whole->bias, tp))) {}

at::Tensor CutHeadImpl::forward(const at::Tensor& x) {
  return at::linear(ddp::functional::copy_to_region(x, tp), weight, bias);
}

std::vector<ddp::ParameterLayout> CutHeadImpl::layouts() {
  return {
      layout_of_rows("weight", weight, whole_rows, tp),
      layout_of_rows("bias", bias, whole_rows, tp)};
}

}  // namespace transformer
