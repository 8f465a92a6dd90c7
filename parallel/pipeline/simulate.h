#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pipeline/schedule.h"

namespace ddp {

/// How long things take, in a unit of the caller's; and how messages go.
struct PipelineCosts {
  double forward = 1;           ///< of one micro-batch through one stage
  double backward = 1;          ///< of one micro-batch through one stage
  double message = 0;           ///< One after the other from one rank to another, of any kind.
  bool blocking_sends = false;  ///< A sender waits until its message has been received.
  /// By stage, what its forwards and backwards are multiplied by; empty: nothing.
  std::vector<double> weights = {};
};

/// The outcome of a step in which each rank follows its list.
struct PipelineRun {
  /// Why the step is not one of this pipeline, or what the ranks wait for; empty if it ended well.
  std::string fault;
  double time = 0;    ///< Until the last rank ended.
  double bubble = 0;  ///< Idle share of the ranks' time.
  /// By rank: the most forwards at a time whose backwards had not ended.
  std::vector<int64_t> most_live;
  int64_t messages = 0;
};

/// Runs a step with clocks instead of computations: a check of lists, and a prediction of time.
///
/// A step that ends without a fault has each forward and backward of each stage and micro-batch
/// once, on the rank of that stage, a backward after its forward, each after what it depends on,
/// and each message received once, in the order of sending, by who needs it.
///
/// \param steps  by rank.
PipelineRun simulate(
    const PipelineShape&, const std::vector<std::vector<PipelineStep>>& steps,
    const PipelineCosts& = {});

}  // namespace ddp
