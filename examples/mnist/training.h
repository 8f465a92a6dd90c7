#pragma once

#include <ddp/distributed_data_parallel.h>
#include <torch/data/example.h>
#include <torch/optim/optimizer.h>

#include "../common/data/image_dataset.h"
#include "../common/tally.h"
#include "net.h"

namespace mnist {

using Model = ddp::DistributedDataParallel<Net>;

using examples::Tally;

/// Runs one optimizer step on this rank's batch; gradients are averaged over the ranks.
///
/// \return loss_sum, correct and samples of this rank's batch, before the step.
/// Collective: yes.
Tally train_step(
    Model& model, torch::optim::Optimizer& optimizer, const torch::data::Example<>& batch);

/// Evaluates this rank's part of `dataset`; together the ranks count each sample exactly once.
///
/// Collective: no.
Tally evaluate(Net& net, examples::ImageDataset& dataset, int rank, int world_size);

}  // namespace mnist
