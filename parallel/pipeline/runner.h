#pragma once

#include <deque>
#include <vector>

#include <ddp/internal/stage_tensors.h>
#include <ddp/pipeline.h>

#include "pipeline/action_events.h"
#include "pipeline/pass.h"
#include "pipeline/schedule.h"
#include "pipeline/tied.h"

namespace ddp {

/// A rank's part in a pipeline: checks it with the other ranks once, and runs its steps.
class PipelineRunner {
 public:
  /// Collective: yes.
  PipelineRunner(
      std::vector<detail::StageModule> chunks, int index, int ranks, LossFn loss,
      const PipelineOptions& options);

  PipelineResult step(const std::vector<at::Tensor>& inputs, const at::Tensor& target);
  at::Tensor eval(const std::vector<at::Tensor>& inputs);

  /// Without steps that a device has not ended.
  const PipelineStats& stats();
  const std::vector<PipelineAction>& actions() const { return actions_; }
  const std::vector<detail::StageModule>& chunks() const { return setup_.chunks; }

 private:
  /// Parameters whose gradients a step sums over ranks, with those that it finds.
  std::vector<at::Tensor> summed_parameters() const;
  void add_stats(QueuedStep step);
  /// Takes the times of steps that have ended. Does not wait.
  void take_times();

  PipelineSetup setup_;
  TiedParameters tied_;
  StageTensors places_;
  PipelineStats stats_;
  std::deque<QueuedStep> queued_;  // steps that are not in stats_ yet
  int64_t steps_done_ = 0;
  std::vector<PipelineAction> actions_;
  PipelineList all_, forwards_;  // of a step, and of an evaluation
};

}  // namespace ddp
