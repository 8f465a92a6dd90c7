#pragma once

#include <string>

#include <ddp/distributed_data_parallel.h>
#include <torch/data/example.h>
#include <torch/optim/optimizer.h>

#include "../common/image_dataset.h"
#include "net.h"

namespace mnist {

using Model = ddp::DistributedDataParallel<Net>;

/// Sums over samples, of this rank or of all.
struct Tally {
  double loss_sum = 0;
  int64_t correct = 0;
  int64_t samples = 0;

  double mean_loss() const { return samples > 0 ? loss_sum / static_cast<double>(samples) : 0; }
  /// "98.61% (355/360)"
  std::string accuracy() const;
};

/// One step of the optimizer on this rank's batch; gradients are averaged over the ranks.
///
/// \return loss_sum, correct and samples of this rank's batch, before the step.
/// Collective: yes.
Tally train_step(
    Model& model, torch::optim::Optimizer& optimizer, const torch::data::Example<>& batch);

/// Evaluates this rank's part of `dataset`; together the ranks count each sample exactly once.
///
/// Collective: no.
Tally evaluate(Net& net, examples::ImageDataset& dataset, int rank, int world_size);

/// Adds up the ranks' tallies. Collective: yes, on the default group.
Tally sum_over_ranks(const Tally& own);

}  // namespace mnist
