#pragma once

#include <cstdint>

#include <ddp/pipeline_schedule.h>

#include "plan/model.h"

namespace ddp::plan {

/// A way to train: a mesh {pp, dp, tp}, in which neighbors share tp, and the schedule on it.
struct Layout {
  int64_t dp = 1, tp = 1, pp = 1;
  bool fsdp = false;         // over dp
  int64_t microbatches = 1;  // of a replica and step; without pp, backward passes that accumulate
  PipelineSchedule schedule = PipelineSchedule::OneFOneB;
  int64_t chunks = 1;  // stages a rank

  int64_t stages() const { return pp * chunks; }
};

/// Returns the number of layers of a stage: the layers over the stages, and one more on the first
/// stages where that leaves a rest.
int64_t layers_of_stage(const Model&, const Layout&, int64_t stage);

/// The part of the model that a rank of the pipeline has.
struct Share {
  double parameters = 0;      // before fsdp cuts them
  int64_t largest_chunk = 0;  // layers
  bool has_head = false;
};
Share share_of(const Model&, const Layout&, int64_t rank);

/// Samples of a replica's largest micro-batch.
int64_t rows_of_microbatch(const Layout&, int64_t batch);

}  // namespace ddp::plan
