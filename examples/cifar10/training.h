#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <ddp/averaged_model.h>
#include <ddp/checkpointer.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/prefetch.h>
#include <ddp/sampler.h>
#include <torch/data/dataloader.h>
#include <torch/optim/sgd.h>

#include "../common/tally.h"
#include "augmented_images.h"
#include "net.h"
#include "options.h"

namespace cifar10 {

/// Returns the factor of the highest learning rate in step `step` of `total`: it grows over the
/// first tenth of them, and falls to 0 along a cosine.
double rate_of_step(int64_t step, int64_t total);

/// The training state of one rank.
class Training {
 public:
  Training(
      const Options& options, Net net, examples::LabeledImages images,
      const ddp::GroupArg& group = {});

  /// Trains on this rank's share of the images, once; of an epoch that a checkpoint has a part of,
  /// on the rest.
  ///
  /// \param on_step  called after each step, with the number of steps done and of the epoch's.
  /// \return the tally of this rank's samples.
  examples::Tally epoch(
      int64_t epoch, const std::function<void(int64_t done, int64_t total)>& on_step = {});

  /// Tallies this rank's part of other images; together the ranks count each exactly once.
  examples::Tally evaluate(const examples::LabeledImages& images);
  /// Writes the weights that evaluate() tests.
  void save(const std::string& file);

  ddp::DistributedDataParallel<Net>& model() { return model_; }
  /// How many steps of an epoch are done that is not over.
  int64_t steps_of_epoch() const { return step_; }
  /// The checkpointer of --checkpoint; a checkpoint's step is the number of epochs done.
  std::optional<ddp::Checkpointer>& checkpointer() { return checkpointer_; }

 private:
  using Loader = torch::data::StatelessDataLoader<Images, ddp::DistributedSampler>;

  at::Tensor input(const at::Tensor& images);
  examples::Tally test(const examples::LabeledImages& images);

  const Options options_;
  const ddp::ProcessGroup group_;
  const std::vector<examples::PixelStatistics> channels_;
  std::shared_ptr<std::atomic<int64_t>> epoch_;
  ddp::DistributedSampler sampler_;
  std::shared_ptr<ddp::PrefetchLoader<std::unique_ptr<Loader>, Augmentation>> loader_;
  ddp::DistributedDataParallel<Net> model_;
  torch::optim::SGD optimizer_;
  std::optional<ddp::AveragedModel> average_;
  int64_t step_ = 0;       // of the current epoch
  examples::Tally tally_;  // of the current epoch
  // After the members that it saves, so that its destructor finishes the last save before theirs.
  std::optional<ddp::Checkpointer> checkpointer_;
};

}  // namespace cifar10
