#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include <ATen/core/Generator.h>
#include <ddp/averaged_model.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/sampler.h>
#include <torch/data/dataloader.h>
#include <torch/optim/adam.h>

#include "../common/data/image_dataset.h"
#include "networks.h"
#include "options.h"

namespace gan {

/// Binary cross entropies of the discriminator's logits, means over the images.
struct Losses {
  double discriminator = 0;  // on real images and samples
  double generator = 0;      // on samples that should be classified as real
};

/// The two networks, with equal weights on every rank.
struct Networks {
  torch::nn::Sequential generator;
  torch::nn::Sequential discriminator;
};

/// Returns the least multiple of 4 that is at least the height of `images`, and at least 8.
int64_t network_size(const examples::LabeledImages& images);

/// Converts images to [N, 1, size, size] in [-1, 1], the range of a generator's tanh.
at::Tensor to_input(const at::Tensor& images, int64_t size);

/// Makes a generator of random numbers that depend only on the seed and the stream.
at::Generator make_random_generator(int64_t seed, int64_t stream);

/// Draws [count, kNoise] numbers of the standard normal distribution.
at::Tensor draw_noise(int64_t count, at::Generator& random);

/// The training state of one rank.
class Training {
 public:
  using Model = ddp::DistributedDataParallel<torch::nn::Sequential>;

  Training(
      const Options& options, const Networks& networks, const examples::LabeledImages& images,
      const ddp::GroupArg& group = {});

  /// Trains on this rank's share of the images, once.
  ///
  /// \param on_step  called after each step, with the number of steps done and of the epoch's.
  /// \return means over this rank's steps.
  Losses epoch(int64_t epoch, const std::function<void(int64_t done, int64_t total)>& on_step = {});

  /// One step of the discriminator, then one of the generator.
  ///
  /// \param real   [N, 1, size, size], of this rank.
  /// \param noise  [N, kNoise], of this rank.
  /// Collective: yes.
  Losses step(const at::Tensor& real, const at::Tensor& noise);

  /// Makes images of `noise`, with the averages of --ema; an image does not depend on the rest of
  /// the batch. Collective: no.
  at::Tensor sample(const at::Tensor& noise);

  /// \throws c10::Error  a network or an optimizer differs on some rank. Collective: yes.
  void check_replicas();

  Model& generator() { return generator_; }
  Model& discriminator() { return discriminator_; }

 private:
  using Loader = torch::data::StatelessDataLoader<examples::ImageDataset, ddp::DistributedSampler>;

  double discriminator_step(const at::Tensor& real, const at::Tensor& fake);
  double generator_step(const at::Tensor& fake);
  at::Tensor generate(const at::Tensor& noise);

  const Options options_;
  ddp::DistributedSampler sampler_;
  std::unique_ptr<Loader> loader_;
  at::Generator random_;  // draws this rank's noise
  Model generator_;
  Model discriminator_;
  torch::optim::Adam generator_optimizer_;
  torch::optim::Adam discriminator_optimizer_;
  std::optional<ddp::AveragedModel> average_;  // of the generator
};

}  // namespace gan
