#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ddp/distributed_data_parallel.h>

#include "benchmarks/ddp_bench/models/models.h"

namespace ddp_bench {

/// One timed part of a step.
struct Span {
  std::string track;  // "compute" or "communication"
  std::string name;   // "forward", "bucket 3"
  double start_ms = 0;
  double end_ms = 0;
  int64_t bytes = 0;  // that it sent
};

/// The spans of one step of mode ddp on this rank, since the start of the step: forward, backward
/// (to the last gradient's average) and optimizer, and for each bucket, in launch order, from its
/// launch to its average.
///
/// The times of buckets are the wrapper's own, from its `stats()`: it samples every step (so it
/// waits for a device), and otherwise obeys `options`. The step follows `warmup` others.
///
/// Collective: yes.
std::vector<Span> record_step(Task task, ddp::DistributedDataParallelOptions options, int warmup);

/// All ranks' spans as one line of JSON: {"model", "mode", "world", "ranks": [[span, ...], ...]},
/// where a span's keys are its fields' names.
///
/// Collective: yes.
std::string timeline_json(
    const std::string& model, const std::vector<Span>& spans, const ddp::ProcessGroup& group);

}  // namespace ddp_bench
