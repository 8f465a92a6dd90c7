#pragma once

#include <cstdint>

namespace ddp {

/// In which order the ranks of a pipeline run the forwards and backwards of micro-batches. With P
/// ranks, m micro-batches and stages of equal cost, a rank is idle for (P - 1) / (m + P - 1) of a
/// step, or (P - 1) / (v m + P - 1) where v stages of each rank are interleaved.
enum class PipelineSchedule {
  /// All forwards, then all backwards: a rank keeps the activations of all micro-batches.
  GPipe,
  /// A forward and a backward by turns: rank r keeps those of min(m, P - r) micro-batches.
  OneFOneB,
  /// The same with several stages a rank, for m micro-batches in rounds of about P: a shorter idle
  /// time, v times the messages, and activations of more micro-batches. With one stage a rank
  /// ("eager 1F1B") rank r keeps those of min(m, 2 (P - r) - 1) micro-batches, and messages that
  /// take as long as a forward hardly delay a step: for stages on slow links.
  Interleaved,
};

/// One computation of a rank in a step of a pipeline.
struct PipelineAction {
  char kind;           ///< 'F': forward; 'B': backward.
  int64_t chunk;       ///< Which of this rank's modules: on rank r of P, stage chunk * P + r.
  int64_t microbatch;  ///< From 0.
};
/// An older name of PipelineAction.
using Action = PipelineAction;

}  // namespace ddp
