#pragma once

#include <cstdint>

#include "plan/cluster.h"
#include "plan/layout.h"
#include "plan/model.h"

namespace ddp::plan {

/// Seconds of a step of the rank that has most to do.
struct StepTime {
  double compute = 0;  // of a rank with a core of its own, in forward and backward
  double tensor = 0;   // sums over tp, for which all of its ranks wait
  double idle = 0;     // waits for other stages, and for cores that other ranks have
  double data = 0;     // gradients and gathers over dp that computing does not hide
  double update = 0;   // AdamW and clipping
  double total() const { return compute + tensor + idle + data + update; }
};

/// Predicts a step of so many samples, of all replicas.
///
/// Cost: that of a simulation of the pipeline, O(pp * chunks * microbatches).
StepTime step_time(const Model&, const Cluster&, const Layout&, int64_t batch);

}  // namespace ddp::plan
