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
/// get so far.
struct BucketStats {
  int64_t bytes = 0;        ///< of its gradients
  double ready_ms = -1;     ///< its last gradient was ready
  double launched_ms = -1;  ///< its collective began, after those of the buckets before it
  double done_ms = -1;      ///< its collective had ended
};

/// One step: from the forward pass that armed the reducer to the end of the reduced backward pass.
struct StepStats {
  int rank = 0;               ///< the rank that ran the step
  int64_t step = 0;           ///< counts reduced backward passes, from 1
  double begin_us = 0;        ///< on the host's monotonic clock, for ranks of one host to compare
  int64_t begin_unix_ns = 0;  ///< the same moment since 1970, on the host's wall clock
  double step_ms = 0;         ///< since the end of the step before; 0 for the first
  double forward_ms = 0;      ///< to the beginning of backward
  double compute_ms = 0;      ///< to the end of autograd's work: forward and backward
  double total_ms = 0;        ///< to the end of the backward pass
  /// From the end of the step before to forward, without optimizers, as far as they are known:
  /// `prepare`, ZeroRedundancyOptimizer, GradScaler and Elastic know theirs, on the CPU. The wait
  /// for data, and what else the program does between two steps, as passes inside no_sync(). 0 for
  /// the first step.
  double data_ms = 0;
  /// The time while at least one bucket was being reduced.
  double communication_ms = 0;
  /// The part of it between hosts, and the rest. -1 where this rank does not know: over shared
  /// memory and a network each host's first rank does, over another backend each rank does if
  /// LOCAL_WORLD_SIZE says that the job has one host, or one rank a host.
  double inter_host_ms = -1;
  double intra_host_ms = -1;  ///< see above
  /// The part of it without computation at the same time: after autograd was done, or while the
  /// call that launches blocked its thread.
  double exposed_ms = 0;
  /// How busy the model's (first) GPU was, in percent, as torch.cuda.utilization() has it: the part
  /// of the driver's last period, a sixth of a second to a second, in which a kernel ran. Read at
  /// the end of sampled steps after the tenth; none where NVIDIA's driver does not tell, as for a
  /// part of a GPU (MIG). Cost: one call of the driver's NVML, which the program need not link.
  std::optional<int> device_utilization = {};
  int64_t bytes = 0;                 ///< of all buckets
  std::vector<BucketStats> buckets;  ///< in launch order

  /// The part of the communication that overlapped with computation, 0 to 1; 1 where there was no
  /// communication. Measured within the step: ddp_bench's column of that name compares steps with
  /// and without communication, so it also counts the processor time that sending takes from
  /// computing.
  double overlap() const { return communication_ms > 0 ? 1 - exposed_ms / communication_ms : 1; }
};

/// The measurements from which `bucket_cap_mb(kTuneBucketCap)` chose the cap.
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
  double latency_ms = 0;              ///< of the smallest all-reduce
  double ms_per_mb = 0;               ///< further time for each MiB of an all-reduce
};

/// A rank that takes longer than the others for its own part of a step.
struct Straggler {
  int rank = 0;  ///< in the wrapper's group
  /// The part that takes most of the further time: "data" (from the end of a step to the forward
  /// pass that is averaged, and so also passes inside no_sync()), "forward", or "backward".
  std::string what;
  double factor = 0;  ///< its time for all three over that of the other ranks
};

/// The measurements of a reducer. On a GPU over NCCL, where the host runs ahead of the device, the
/// times of a step are the device's, between events; a step that the device has not ended yet is
/// left out, and no step waits for one. Elsewhere the host takes them; a sampled step of a model on
/// several GPUs then waits for its collectives.
struct ReductionStats {
  std::vector<StepStats> steps;  ///< the last ones that were sampled, oldest first, at most 128
  int64_t rebuilds = 0;          ///< of the buckets
  int64_t rebuilt_at = 0;        ///< they were last rebuilt before this step; 0: never
  int64_t bucket_bytes = 0;      ///< of memory that the buckets hold between steps
  /// The buckets in launch order, each with the indices of its parameters. Indices count the
  /// averaged parameters in their order of registration.
  std::vector<std::vector<size_t>> buckets = {};
  std::string backend = {};  ///< the backend that reduces the gradients: "shm", "gloo", "nccl", ...
  /// The ranks that were slower than the median of the others by about a fifth or more in the last
  /// 20 steps, or in the last 40 or 80 where steps differ more; the same on every rank. Each rank
  /// takes its own times of every step (on a GPU of every fourth), without its waits for gradients,
  /// and sends them with these; none where a rank has stats_every(0). Collectives inside forward
  /// spread one rank's time to all. Cost: two readings of the clock a part, and 12 bytes a rank in
  /// the last bucket.
  std::vector<Straggler> stragglers = {};
  /// Whether all averaged passes so far, at least one, have used the same parameters on this rank:
  /// `static_graph(true)` then is allowed as far as that goes, in place of find_unused_parameters.
  bool can_set_static_graph = false;
  /// The samples a second that this rank counted by `model->count_trained()`, over the last 100
  /// averaged passes. 0 for a program that does not call it.
  double trained_per_second = 0;
  int64_t peak_host_bytes = 0;    ///< the most memory that this process has had
  int64_t peak_device_bytes = 0;  ///< the most that tensors have had on the model's (first) device
  /// Set after the cap was tuned.
  std::optional<BucketCapTuning> tuning = {};
};

/// Gathers the measurements of all ranks.
///
/// \return the steps of all ranks, by rank; all other fields as on this rank.
///
/// Collective: yes. Blocks: host.
DDP_API ReductionStats all_gather_stats(const ReductionStats& stats, const GroupArg& group = {});

/// One line of text: step time, share of communication, overlap, what of them is good and what is
/// not, by docs/tuning.md, backward's share, how busy the GPU was where that is known, the ranks
/// that are slow, and the cap that was tuned. Medians over the steps with the current buckets, or
/// over all steps while there is none; "" when there are no steps.
DDP_API std::string summary(const ReductionStats& stats);

/// Writes the steps as a trace that chrome://tracing and ui.perfetto.dev show: a process a rank,
/// with a track for its computation and one for each bucket's reduction.
///
/// Times are on the wall clocks of the ranks' hosts, and counted as in traces of `Profiler` and
/// torch.profiler: microseconds since `baseTimeNanoseconds`, which is in the file. So one file may
/// hold the events of both. docs/profiling.md shows how.
///
/// \throws c10::Error  when the file cannot be written.
DDP_API void write_trace(const std::string& path, const ReductionStats& stats);

}  // namespace ddp
