// Activation checkpointing of a net's layers, in each form that a call may have.
#include <ddp/activation_checkpoint.h>

#include "differential/run.h"

namespace ddp::differential {

void recompute(RankRun& run) {
  const auto& label = run.program.label("recompute");
  auto& net = run.net;
  const auto segments = std::min<int64_t>(2, static_cast<int64_t>(run.layers.size()));
  if (label == "sequential") {
    torch::nn::Sequential parts;
    run.trace.say(
        "torch::nn::Sequential parts; const int64_t segments = " + std::to_string(segments) + ";");
    for (const auto& layer : run.layers) parts->push_back(layer);
    run.trace.say(
        "for (auto& m : net->children()) parts->push_back(std::dynamic_pointer_cast<Layer>(m));");
    DDP_DO(run.trace, net->calls = {[parts, segments](at::Tensor x) mutable {
                        return checkpoint_sequential(parts, segments, x);
                      }});
    return;
  }
  for (size_t i = 0; i < run.layers.size(); ++i) {
    if (label == "none") break;
    const auto layer = run.layers[i];
    const auto id = std::to_string(i);
    auto& call = net->calls[i];
    run.trace.say(
        "{ auto layer = std::dynamic_pointer_cast<Layer>(net->children()[" + id +
        "]); auto& call = net->calls[" + id + "];");
    const auto unit = run.units.find(i);
    if (label == "each" && unit != run.units.end()) {
      run.trace.say(
          "call = [unit = unit" + id + "](at::Tensor x) mutable { return checkpoint(unit, x); };");
      call = [unit = unit->second](at::Tensor x) mutable { return checkpoint(unit, x); };
      run.trace.say("}");
      continue;
    }
    if (label == "each")
      DDP_DO(
          run.trace, call = [layer](at::Tensor x) mutable { return checkpoint(layer, x); });
    if (label == "functions") {
      DDP_DO(
          run.trace, call = [layer, inner = call](at::Tensor x) {
            return checkpoint(CheckpointOptions().modules({layer}), inner, x);
          });
    }
    if (label == "tuples") {
      DDP_DO(
          run.trace, call = [layer, inner = call](at::Tensor x) {
            const auto halves = [inner](const at::Tensor& t) {
              const auto y = inner(t).chunk(2, 1);
              return std::make_tuple(y[0], y[1]);
            };
            const auto y =
                checkpoint(CheckpointOptions().parameters(layer->parameters()), halves, x);
            return torch::cat({std::get<0>(y), std::get<1>(y)}, 1);
          });
    }
    run.trace.say("}");
  }
}

}  // namespace ddp::differential
