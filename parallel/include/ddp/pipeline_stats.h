#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ddp/export.h>
#include <ddp/pipeline_schedule.h>
#include <ddp/process_group.h>

namespace ddp {

/// One computation of a step. Times are milliseconds since this rank began the step: on its host,
/// or on its device where no host waits for messages, as over NCCL.
struct ActionStats {
  PipelineAction action;  ///< what was computed
  int64_t stage = 0;      ///< whose forward or backward it is
  double begin_ms = 0;    ///< when its tensors had come
  double end_ms = 0;      ///< when what it made was on its way
};

/// One step of a rank.
struct PipelineStepStats {
  int rank = 0;                      ///< in the pipeline's process group
  int64_t step = 0;                  ///< from 1
  int64_t begin_unix_ns = 0;         ///< since 1970, on the host's wall clock
  double total_ms = 0;               ///< to the end of the last action
  std::vector<ActionStats> actions;  ///< in the order of the schedule

  /// The time that the rank computed.
  DDP_API double busy_ms() const;
};

/// The measurements of a pipeline.
struct PipelineStats {
  std::vector<PipelineStepStats> steps;  ///< the last ones, oldest first, at most 128 of a rank

  /// The share of the ranks' time in which they did not compute, 0 to 1: the median of the steps.
  /// With equal stages, P ranks and m micro-batches it is (P - 1) / (m + P - 1) at best, or
  /// (P - 1) / (v m + P - 1) where v stages of each rank are interleaved.
  ///
  /// A step lasts as long as on the rank that takes longest, which is the first: gather the
  /// measurements of all ranks before.
  DDP_API double bubble() const;
};

/// Gathers the measurements of all ranks of a pipeline.
///
/// \return the steps of all ranks, by rank.
///
/// Collective: yes. Blocks: host.
DDP_API PipelineStats all_gather_stats(const PipelineStats& stats, const GroupArg& group = {});

/// One line of text: time of a step, and bubble.
DDP_API std::string summary(const PipelineStats& stats);

/// Draws the steps as a trace that chrome://tracing and ui.perfetto.dev show: a row for each stage,
/// with a box for each forward ("F2") and backward ("B2") of a micro-batch; the gaps are the
/// bubble. Times are as in the traces of ReductionStats and of Profiler.
///
/// \throws c10::Error  when the file cannot be written.
DDP_API void write_trace(const std::string& path, const PipelineStats& stats);

}  // namespace ddp
