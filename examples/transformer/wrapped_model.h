#pragma once

#include <variant>

#include <ddp/distributed_data_parallel.h>
#include <ddp/fully_sharded.h>

#include "model.h"

namespace transformer {

/// The model as the ranks of the data group train it: each with a copy, or with --fsdp with a
/// shard.
class WrappedModel {
 public:
  WrappedModel(const Options& options, const LanguageModel& net);

  /// As the model's. Collective with --fsdp, in evaluation, too.
  at::Tensor forward(const at::Tensor& characters);
  LanguageModel& net();
  /// The wrapper.
  torch::nn::Module& module();
  bool is_sharded() const { return std::holds_alternative<Sharded>(wrapper_); }

  using Replicated = ddp::DistributedDataParallel<LanguageModel>;
  using Sharded = ddp::FullyShardedDataParallel<LanguageModel>;
  /// \throws std::bad_variant_access  with --fsdp.
  Replicated& replicated() { return std::get<Replicated>(wrapper_); }
  /// \throws std::bad_variant_access  without.
  Sharded& sharded() { return std::get<Sharded>(wrapper_); }

 private:
  std::variant<Replicated, Sharded> wrapper_;
};

}  // namespace transformer
