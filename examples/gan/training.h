#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <ATen/core/Generator.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/sampler.h>
#include <torch/data/dataloader.h>
#include <torch/optim/adam.h>

#include "../common/image_dataset.h"
#include "networks.h"
#include "options.h"

namespace gan {

/// Binary cross entropies of the discriminator's answers, means over the images.
struct Losses {
  double discriminator = 0;  // on real images and samples
  double generator = 0;      // on samples that should be taken for real
};

/// The two networks, of equal weights on every rank.
struct Networks {
  torch::nn::Sequential generator;
  torch::nn::Sequential discriminator;
};

/// The least multiple of 4 that is not below the height of `images`, and 8 at least.
int64_t network_size(const examples::LabeledImages& images);

/// What the networks take: [N, 1, size, size] in [-1, 1], as a generator's tanh gives.
at::Tensor to_input(const at::Tensor& images, int64_t size);

/// Random numbers that depend on the seed and the stream alone.
at::Generator make_chance(int64_t seed, int64_t stream);

/// [count, kNoise] of the standard normal distribution.
at::Tensor draw_noise(int64_t count, at::Generator& chance);

/// What one rank trains with.
class Training {
 public:
  using Model = ddp::DistributedDataParallel<torch::nn::Sequential>;

  Training(
      const Options& options, const Networks& networks, const examples::LabeledImages& images,
      const ddp::GroupArg& group = {});

  /// Trains on this rank's share of the images, once.
  ///
  /// \param on_step  called after each, with the number of steps done and of the epoch's.
  /// \return means over this rank's steps.
  Losses epoch(int64_t epoch, const std::function<void(int64_t done, int64_t total)>& on_step = {});

  /// One step of the discriminator, then one of the generator.
  ///
  /// \param real   [N, 1, size, size], of this rank.
  /// \param noise  [N, kNoise], of this rank.
  /// Collective: yes.
  Losses step(const at::Tensor& real, const at::Tensor& noise);

  /// Images of `noise`, one by one the same whatever else is in the batch. Collective: no.
  at::Tensor sample(const at::Tensor& noise);

  /// \throws c10::Error  when a network or an optimizer is another on some rank. Collective: yes.
  void check_replicas();

  Model& generator() { return generator_; }
  Model& discriminator() { return discriminator_; }

 private:
  using Loader = torch::data::StatelessDataLoader<examples::ImageDataset, ddp::DistributedSampler>;

  double discriminator_step(const at::Tensor& real, const at::Tensor& fake);
  double generator_step(const at::Tensor& fake);

  const Options options_;
  ddp::DistributedSampler sampler_;
  std::unique_ptr<Loader> loader_;
  at::Generator chance_;  // of this rank's noise
  Model generator_;
  Model discriminator_;
  torch::optim::Adam generator_optimizer_;
  torch::optim::Adam discriminator_optimizer_;
};

}  // namespace gan
