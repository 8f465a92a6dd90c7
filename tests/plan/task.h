#pragma once

#include "plan/planner.h"

namespace plan_test {

/// 8 layers of 12 * 64^2 parameters, a table of 100 rows, and ranks that compute 10^9 operations a
/// second.
inline ddp::plan::Task small_task(int64_t ranks) {
  ddp::plan::Task task;
  auto& model = task.model;
  model.layers = 8;
  model.hidden = 64;
  model.heads = 4;
  model.sequence = 32;
  model.vocabulary = 100;
  model.parameters = 8 * 12 * 64 * 64 + 100 * 64;
  auto& cluster = task.cluster;
  cluster.ranks = ranks;
  cluster.memory = 1e9;
  cluster.operations = 1e9;
  cluster.host = {1e-6, 1e9};
  cluster.network = {1e-4, 1e8};
  task.batch = 16;
  return task;
}

inline ddp::plan::Layout mesh(int64_t dp, int64_t tp, int64_t pp, int64_t microbatches = 1) {
  ddp::plan::Layout layout;
  layout.dp = dp;
  layout.tp = tp;
  layout.pp = pp;
  layout.microbatches = microbatches;
  return layout;
}

}  // namespace plan_test
