#include "cut_attention.h"

namespace transformer {
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

}  // namespace transformer
