#include "plan/layout.h"

#include <algorithm>

namespace ddp::plan {

int64_t layers_of_stage(const Model& model, const Layout& layout, int64_t stage) {
  return model.layers / layout.stages() + (stage < model.layers % layout.stages() ? 1 : 0);
}

Share share_of(const Model& model, const Layout& layout, int64_t rank) {
  Share share;
  int64_t all_layers = 0;
  for (int64_t chunk = 0; chunk < layout.chunks; ++chunk) {
    const auto layers = layers_of_stage(model, layout, chunk * layout.pp + rank);
    all_layers += layers;
    share.largest_chunk = std::max(share.largest_chunk, layers);
  }
  share.has_head = rank + 1 == layout.pp;
  share.parameters = static_cast<double>(all_layers) * model.layer_parameters();
  // A table that the first and the last stage share lies on both.
  if (rank == 0 || share.has_head) {
    share.parameters += static_cast<double>(model.table_parameters());
  }
  share.parameters /= static_cast<double>(layout.tp);
  return share;
}

int64_t rows_of_microbatch(const Layout& layout, int64_t batch) {
  const auto parts = layout.dp * layout.microbatches;
  return (batch + parts - 1) / parts;
}

}  // namespace ddp::plan
