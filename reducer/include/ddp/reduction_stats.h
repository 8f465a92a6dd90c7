#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ddp/export.h>
#include <ddp/process_group.h>

namespace ddp {

/// One bucket in one step. Times are milliseconds since the step began; -1 where a step did not
/// come so far.
struct BucketStats {
  int64_t bytes = 0;        ///< of its gradients
  double ready_ms = -1;     ///< its last gradient was there
  double launched_ms = -1;  ///< its collective began, once those before it had
  double done_ms = -1;      ///< it was seen to be over
};

/// One step: from the forward pass that armed the reducer to the end of the reduced backward pass.
struct StepStats {
  int rank = 0;               ///< whose step it was
  int64_t step = 0;           ///< counts reduced backward passes, from 1
  double begin_us = 0;        ///< on the host's monotonic clock, for ranks of one host to compare
  int64_t begin_unix_ns = 0;  ///< the same moment since 1970, on the host's wall clock
  double step_ms = 0;         ///< since the end of the step before; 0 for the first
  double forward_ms = 0;      ///< to the first thing that backward did
  double compute_ms = 0;      ///< to the end of autograd's work: forward and backward
  double total_ms = 0;        ///< to the end of the backward pass
  /// While at least one bucket was under way.
  double communication_ms = 0;
  /// Of that, when no computation went on beside it: after autograd was done, or while the call
  /// that launches held its thread up.
  double exposed_ms = 0;
  int64_t bytes = 0;                 ///< of all buckets
  std::vector<BucketStats> buckets;  ///< in launch order

  /// The part of the communication that was hidden behind the computation, 0 to 1; 1 where there
  /// was none. As it was seen within the step: ddp_bench's column of that name compares steps with
  /// and without communication, so that what sending takes from computing counts there.
  double overlap() const { return communication_ms > 0 ? 1 - exposed_ms / communication_ms : 1; }
};

/// How `bucket_cap_mb(kTuneBucketCap)` came to its choice.
struct BucketCapTuning {
  /// A size that was considered.
  struct Candidate {
    double cap_mb = 0;        ///< MiB
    double predicted_ms = 0;  ///< of a step
  };
  std::vector<Candidate> candidates;  ///< by size
  double cap_mb = 0;                  ///< the choice
  double predicted_ms = 0;            ///< of a step with it; 0: this rank has no prediction
  double measured_ms = 0;             ///< median of the steps sampled since; 0 before the first
  double latency_ms = 0;              ///< of an all-reduce, however small
  double ms_per_mb = 0;               ///< and of each MiB in it
};

/// What a reducer measured, all on the host. On CUDA, where the host runs ahead of the device,
/// computation counts until it was handed over; for the ends of collectives a sampled step waits.
struct ReductionStats {
  std::vector<StepStats> steps;  ///< the last ones that were sampled, oldest first, at most 128
  int64_t rebuilds = 0;          ///< of the buckets
  int64_t rebuilt_at = 0;        ///< the step before which they last were; 0: none yet
  int64_t bucket_bytes = 0;      ///< of memory that the buckets hold between steps
  /// The buckets in launch order, each with the indices of its parameters, which count those that
  /// are averaged in their order of registration.
  std::vector<std::vector<size_t>> buckets = {};
  std::string backend = {};  ///< that carries the gradients: "shm", "gloo", "nccl", ...
  /// Once it was tuned.
  std::optional<BucketCapTuning> tuning = {};
};

/// Brings together what all ranks measured.
///
/// \return the steps of all ranks, by rank; what else there is as on this rank.
///
/// Collective: yes. Blocks: host.
DDP_API ReductionStats all_gather_stats(const ReductionStats& stats, const GroupArg& group = {});

/// One line for people: step time, share of communication, overlap, and the cap that was tuned.
/// Medians over the steps with the buckets as they are now, or over all while there is none; ""
/// when there are no steps.
DDP_API std::string summary(const ReductionStats& stats);

/// Writes the steps as a trace that chrome://tracing and ui.perfetto.dev show: a process a rank,
/// with a track for its computation and one for each bucket under way.
///
/// Times are on the wall clocks of the ranks' hosts, and counted as in traces of `Profiler` and
/// torch.profiler: microseconds since `baseTimeNanoseconds`, which is in the file. So the events of
/// both may be put into one file. docs/profiling.md shows how.
///
/// \throws c10::Error  when the file cannot be written.
DDP_API void write_trace(const std::string& path, const ReductionStats& stats);

}  // namespace ddp
