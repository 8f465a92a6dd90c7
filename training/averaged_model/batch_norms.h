#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/process_group.h>
#include <torch/nn/module.h>

namespace ddp {

/// While it exists, the batch normalizations of a module average the statistics of all batches, in
/// training mode.
class AveragingBatchNorms {
 public:
  /// Resets the running statistics.
  ///
  /// \throws c10::ValueError  the module has no batch normalization, or one that cannot be found by
  ///         its class; nothing changes then.
  explicit AveragingBatchNorms(torch::nn::Module& module);
  /// Restores momenta and modes.
  ~AveragingBatchNorms();
  C10_DISABLE_COPY_AND_ASSIGN(AveragingBatchNorms);

  /// Makes the statistics those of the batches of all ranks.
  ///
  /// Collective: yes. Cost: one all-reduce of two doubles a feature.
  void combine(const ProcessGroup& group) const;

  /// \throws c10::ValueError  no batch has reached a batch normalization with running statistics;
  ///         after combine() on every rank alike.
  void check_had_batches() const;

 private:
  struct Norm {
    std::optional<double>* momentum;
    std::optional<double> its_momentum;
    at::Tensor mean, var, batches;  // undefined where it has no running statistics
  };

  std::vector<Norm> norms_;
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes_;  // parents first
  torch::nn::Module& module_;
  const bool was_training_;
};

}  // namespace ddp
