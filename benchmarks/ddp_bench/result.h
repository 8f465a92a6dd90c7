#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "runs/memory_sampler.h"
#include "statistics.h"

namespace ddp_bench {

/// CPU time of all threads of a rank; the mean of the ranks.
struct CpuTime {
  double ms = 0;
  PairedRatio ratio;  // to the mode of the other ratio
};

/// The results of one mode; benchmarks/README.md defines each number. Times are of a step, in
/// milliseconds.
struct Result {
  std::string model;
  std::string mode;
  std::string backend;
  int world = 1;
  std::optional<double> bucket_cap_mb;  // unset: the mode's own, or a mode without buckets
  double step_ms = 0;
  double step_ms_p10 = 0;
  double step_ms_p90 = 0;
  PairedRatio ratio;  // to mode `none`
  CpuTime cpu;
  double compute_ms = 0;
  double comm_ms = 0;
  double overlap = 0;
  int64_t bytes = 0;
  double checksum = 0;
};

/// The memory of one mode, which ran alone in its processes.
struct MemoryResult {
  std::string model;
  std::string mode;
  std::string backend;
  int world = 1;
  int64_t bytes = 0;  // of the gradients
  Pss peak;           // mean of the ranks
};

/// The times of one way to run two linear layers, for --tp.
struct TensorParallelResult {
  std::string mode;
  std::string backend;
  int world = 1;
  double step_ms = 0;
  std::optional<PairedRatio> speedup = {};  // of cut layers: one rank's time over theirs
  double messages_ms = 0;                   // of a step's messages alone
};

/// One way to run stages of equal cost, for --pp.
struct PipelineResult {
  std::string mode;
  std::string schedule;
  std::string backend;
  int world = 1;
  int64_t microbatches = 1;
  double step_ms = 0;
  std::optional<PairedRatio> speedup = {};  // of the pipeline: one rank's time over its
  double bubble = 0;                        // share of the ranks' time without computation
  double ideal_bubble = 0;                  // the schedule's own
  double ideal_ms = 0;                      // of a step with it, and computation as on one rank
};

/// One way to train layers of equal size, for --fsdp.
struct FullyShardedResult {
  std::string mode;
  std::string backend;
  int world = 1;
  int64_t bytes = 0;  // of the whole parameters
  double step_ms = 0;
  PairedRatio ratio;  // to mode `ddp`
  CpuTime cpu;
  int64_t peak_bytes = 0;  // with --fsdp-memory, and no times
  int64_t rest_bytes = 0;  // the same, after the last step
};

/// One line, without its end; the keys are the fields' names, in their order.
std::string to_json(const Result& result);
std::string to_json(const MemoryResult& result);
std::string to_json(const TensorParallelResult& result);
std::string to_json(const FullyShardedResult& result);
std::string to_json(const PipelineResult& result);

}  // namespace ddp_bench
