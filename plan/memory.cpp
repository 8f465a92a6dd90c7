#include "plan/memory.h"

#include <algorithm>

#include "pipeline/schedule.h"

namespace ddp::plan {
namespace {

constexpr double kState = 16;  // bytes: parameter, gradient, AdamW's two numbers

/// The most chunks and micro-batches of a rank whose backward has not run.
int64_t most_live(const Layout& layout, int64_t rank) {
  if (layout.pp == 1) return 1;
  const PipelineShape shape{layout.pp, layout.chunks, layout.microbatches};
  int64_t live = 0, most = 0;
  for (const auto& action : pipeline_actions(layout.schedule, shape, rank)) {
    live += action.kind == 'F' ? 1 : -1;
    most = std::max(most, live);
  }
  return most;
}

/// docs/fully_sharded.md#memory: units are whole by turns; in a pipeline all of a rank's, from the
/// first forward of a step to its last backward, with whole gradients.
double whole_bytes(const Model& model, const Layout& layout, double own_parameters) {
  if (!layout.fsdp) return 0;
  if (layout.pp > 1) return 2 * kFloatBytes * own_parameters;
  const double unit =
      std::max(model.layer_parameters(), static_cast<double>(model.table_parameters())) /
      static_cast<double>(layout.tp);
  return kFloatBytes * unit * (4 + 1 / static_cast<double>(layout.dp));
}

Memory memory_of_rank(const Model& model, const Layout& layout, int64_t batch, int64_t rank) {
  const auto share = share_of(model, layout, rank);
  const auto rows = static_cast<double>(rows_of_microbatch(layout, batch));
  const double cut = layout.fsdp ? static_cast<double>(layout.dp) : 1;

  Memory memory;
  memory.state = kState * share.parameters / cut;
  memory.whole = whole_bytes(model, layout, share.parameters);
  const auto live = static_cast<double>(most_live(layout, rank) * share.largest_chunk);
  memory.activations = rows * live * layer_activations(model, layout.tp);
  if (model.checkpoint) {  // the layer that is computed again
    auto kept = model;
    kept.checkpoint = false;
    memory.activations += rows * layer_activations(kept, layout.tp);
  }
  if (share.has_head) memory.activations += rows * logit_bytes(model, layout.tp);
  return memory;
}

}  // namespace

Memory memory_of(const Model& model, const Layout& layout, int64_t batch) {
  Memory most;
  for (int64_t rank = 0; rank < layout.pp; ++rank) {
    const auto memory = memory_of_rank(model, layout, batch, rank);
    if (memory.total() > most.total()) most = memory;
  }
  return most;
}

}  // namespace ddp::plan
