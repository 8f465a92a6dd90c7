#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/cost.h"
#include "plan/layout.h"
#include "plan/model.h"

namespace ddp::plan {

struct Task {
  Model model;
  Cluster cluster;
  int64_t batch = 1;         // samples of a step, of all replicas
  int64_t microbatches = 0;  // of a replica; 0: what is fastest
};

struct Plan {
  Layout layout;
  Memory memory;
  StepTime time;
};

/// A mesh, with or without fsdp, of which no layout fits.
struct Rejection {
  Layout layout;  // the one that needs least memory, where that is the reason
  std::string reason;
};

struct Plans {
  std::vector<Plan> fitting;        // the fastest first
  std::vector<Rejection> rejected;  // by dp, then tp, then pp
};

/// Tries all meshes of the ranks, each with and without fsdp, with each schedule and with
/// micro-batches by powers of two, if the task has no number, and keeps of each mesh, fsdp and
/// schedule the fastest that fits.
///
/// \param task  one of which error_of() finds nothing.
Plans make_plans(const Task&);

/// \return why a task makes no sense; "" where it does.
std::string error_of(const Task&);

}  // namespace ddp::plan
