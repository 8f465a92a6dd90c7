#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <ddp/fully_sharded.h>
#include <ddp/pipeline.h>

#include "../../common/tally.h"
#include "../text.h"
#include "model.h"

namespace transformer {

/// What this rank has of the predictions for a batch.
struct Prediction {
  at::Tensor logits;  // [n, vocabulary]; with --tp some of the vocabulary
  at::Tensor target;  // [n]; with --cp some of the characters
  at::Tensor loss;    // their mean
};

/// The model as the ranks train it: each of the data group with a copy, or with --fsdp with a
/// shard; and with --pp the stages of a pipeline.
class TrainedModel {
 public:
  /// The same model for a seed, however it is cut. Collective.
  TrainedModel(const Options& options, const Groups& groups, int64_t vocabulary);

  /// Adds the gradients of a batch to `.grad`, divided by --accumulate.
  ///
  /// \param averages  over the data group; with --pp and --fsdp every pass does.
  /// \return the characters' losses; of a pipeline on its last stage.
  ///
  /// Collective: yes.
  examples::Tally backward(const Batch& batch, bool averages);
  /// Without gradients. \return nothing on the earlier stages of a pipeline.
  /// Collective: with --tp, --cp, --pp and --fsdp.
  std::optional<Prediction> predict(const Batch& batch);
  /// Counts the characters that were foreseen, too. Collective with --tp.
  examples::Tally tally_of(const Prediction& prediction) const;
  /// The logits of the character after [1, T], [1, vocabulary]. Collective as predict().
  at::Tensor predict_next(const at::Tensor& characters);

  /// The wrapper; with --pp the pipeline of it.
  torch::nn::Module& module();
  /// The parameters of the whole model, of all ranks that have a part of it. Collective with --pp.
  int64_t numel();
  const Groups& groups() const { return groups_; }
  /// Is one of so many whole models from now on.
  void become_replica(int64_t replica, int64_t replicas);
  bool is_sharded() const { return std::holds_alternative<Sharded>(wrappers_.front()); }
  /// Throws where replicas differ. Collective: yes.
  void check_replicas();

  using Replicated = ddp::DistributedDataParallel<LanguageModel>;
  using Sharded = ddp::FullyShardedDataParallel<LanguageModel>;
  /// \throws std::bad_variant_access  with --fsdp.
  Replicated& replicated() { return std::get<Replicated>(wrappers_.front()); }
  /// \throws std::bad_variant_access  without.
  Sharded& sharded() { return std::get<Sharded>(wrappers_.front()); }

 private:
  using Wrapper = std::variant<Replicated, Sharded>;

  LanguageModel make_net(Stage stage) const;
  Wrapper wrap(const LanguageModel& net) const;
  template <typename M>
  std::unique_ptr<ddp::PipelineStageBase> make_pipeline();
  /// [N, T] of the characters that this rank predicts.
  at::Tensor own_target(const Batch& batch) const;
  /// What the first stage gets; nothing on others.
  std::vector<at::Tensor> first_inputs(const at::Tensor& characters) const;
  /// Of all positions of this rank; undefined on the earlier stages of a pipeline.
  at::Tensor logits_of(const at::Tensor& characters);
  examples::Tally own_backward(const Batch& batch);
  examples::Tally pipelined_backward(const Batch& batch);
  Prediction prediction_of(const at::Tensor& logits, const Batch& batch) const;

  const Options& options_;
  const int64_t vocabulary_;
  Groups groups_;
  std::vector<LanguageModel> nets_;  // one; with interleaved stages one for each
  std::vector<Wrapper> wrappers_;    // of them
  std::unique_ptr<ddp::PipelineStageBase> pipeline_;
};

}  // namespace transformer
