#pragma once

#include <ddp/join.h>

#include "join/join_round.h"
#include "wrapper/state.h"

namespace ddp {

/// Stands in for the wrapper on a rank that has no input left while others do.
class ModelJoinHook : public JoinHook {
 public:
  ModelJoinHook(DistributedDataParallelBase::State& model, const JoinOptions& options)
      : model_(model), options_(options) {}

  /// Joins one averaged backward pass.
  void main_hook() override;
  /// Gives all ranks the model of the last rank with input, and the state of its optimizers.
  void post_hook(bool is_last_joiner) override;
  RankStatus local_status() { return model_.terms().local_status(/*active=*/false); }

 private:
  DistributedDataParallelBase::State& model_;
  const JoinOptions options_;
};

}  // namespace ddp
