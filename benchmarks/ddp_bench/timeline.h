#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ddp/distributed_data_parallel.h>

#include "models.h"

namespace ddp_bench {

/// Something that took time in a step.
struct Span {
  std::string track;  // "compute" or "communication"
  std::string name;   // "forward", "bucket 3"
  double start_ms = 0;
  double end_ms = 0;
  int64_t bytes = 0;  // that it sent
};

/// What one step of mode ddp did when, on this rank, from the start of the step on: forward,
/// backward (to the last gradient's average) and optimizer, and each bucket's way from its launch
/// to its average, in launch order.
///
/// The times of buckets are the wrapper's own, from its `stats()`: it takes those of every step
/// (for which it waits for a device), and is otherwise as `options` have it. The step follows
/// `warmup` others.
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
