#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include <ddp/checkpointer.h>
#include <ddp/diloco.h>
#include <ddp/elastic.h>
#include <ddp/lr_scheduler.h>
#include <ddp/sampler.h>
#include <ddp/zero.h>

#include "../common/leave_on_signal.h"
#include "../common/progress.h"
#include "../common/tally.h"
#include "model/trained_model.h"
#include "text.h"

namespace transformer {

using examples::Tally;

/// The training state of one rank.
class Training {
 public:
  /// \param options  must outlive this object.
  /// \param model    of those options.
  /// \param windows  enough for a batch of every rank.
  Training(const Options& options, TrainedModel model, Windows windows);

  /// One step of the optimizer, on the batches of `options.accumulate` backward passes: gradients,
  /// then apply().
  /// Collective: yes.
  void step();
  /// The gradients of a step. Collective: yes.
  void backward();
  /// What changes with a step. Collective: with --diloco.
  void apply();

  /// Adds all that steps change to an elastic run, which does without begin() and save_if_due().
  void add_to(ddp::Elastic& run);
  /// Goes on with the ranks of a generation.
  void follow(const ddp::ElasticGeneration& generation);

  /// \return the tally of this rank's characters since the last call, each before its step; of a
  ///         pipeline on its last stage.
  Tally take_tally() { return std::exchange(tally_, {}); }
  int64_t steps_done() const { return steps_done_; }

  /// Tallies this rank's part of a text; together the ranks of `totals` count each character once.
  /// Collective: as TrainedModel::predict().
  Tally evaluate(const Windows& windows);

  /// With --resume, continues from the last checkpoint; with --coordinator, where the other regions
  /// are. Collective: yes.
  ///
  /// \throws c10::ValueError  without --resume, the folder holds another run's checkpoints.
  void begin(examples::Progress& progress);
  /// Saves if a save is due, and after the last step. Collective: yes.
  void save_if_due();
  /// Where a rank was told to, saves and ends the process on all ranks. Collective: yes.
  void leave_if_told(examples::LeaveOnSignal& leaving, examples::Progress& progress);
  /// Returns once the last checkpoint is on the disk, and the last exchange over. Collective: yes.
  void finish();
  /// Throws where ranks differ in parameters that are the same on both. Collective: yes.
  void check_replicas();
  TrainedModel& model() { return model_; }
  /// How regions exchange; null without --diloco.
  const ddp::DiLoCo* diloco() const { return diloco_.get(); }

 private:
  Batch next_batch();
  void clip_gradients();
  const Groups& groups() const { return model_.groups(); }

  const Options& options_;
  const Windows windows_;
  ddp::DistributedSampler sampler_;
  TrainedModel model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  ddp::LinearLR warm_up_;
  ddp::CosineAnnealingLR cosine_;
  ddp::SequentialLR schedule_;
  std::unique_ptr<ddp::DiLoCo> diloco_;
  int64_t steps_done_ = 0;
  Tally tally_;
  // After the members that it saves, so that its destructor finishes the last save before theirs.
  std::optional<ddp::Checkpointer> checkpointer_;
};

}  // namespace transformer
