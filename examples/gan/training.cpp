#include "training.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>

namespace gan {
namespace {

// Maps [0, 255] to [-1, 1].
constexpr examples::PixelStatistics kPixels{0.5, 0.5};

torch::optim::AdamOptions adam(const Options& options) {
  return torch::optim::AdamOptions(options.lr).betas({0.5, 0.999});
}

ddp::DistributedSamplerOptions sampler_options(
    const Options& options, const ddp::ProcessGroup& group) {
  return ddp::DistributedSamplerOptions()
      .num_replicas(ddp::get_world_size(group))
      .rank(ddp::get_rank(group))
      .seed(options.seed);
}

ddp::DistributedDataParallelOptions wrapper_options(const ddp::ProcessGroup& group) {
  return ddp::DistributedDataParallelOptions().process_group(group);
}

at::Tensor loss_where(bool real, const at::Tensor& logits) {
  return at::binary_cross_entropy_with_logits(logits, at::full_like(logits, real ? 1 : 0));
}

/// Disables the gradients of a module's parameters for its lifetime.
class FrozenParameters {
 public:
  explicit FrozenParameters(const torch::nn::Module& module) : parameters_(module.parameters()) {
    for (auto& p : parameters_) p.set_requires_grad(false);
  }
  ~FrozenParameters() {
    for (auto& p : parameters_) p.set_requires_grad(true);
  }
  FrozenParameters(const FrozenParameters&) = delete;
  FrozenParameters& operator=(const FrozenParameters&) = delete;

 private:
  std::vector<at::Tensor> parameters_;
};

}  // namespace

int64_t network_size(const examples::LabeledImages& images) {
  return std::max<int64_t>(8, (images.images.size(1) + 3) / 4 * 4);
}

at::Tensor to_input(const at::Tensor& images, int64_t size) {
  return examples::prepare_images(images, kPixels, size);
}

at::Generator make_random_generator(int64_t seed, int64_t stream) {
  return at::make_generator<at::CPUGeneratorImpl>(
      static_cast<uint64_t>(seed) + static_cast<uint64_t>(stream));
}

at::Tensor draw_noise(int64_t count, at::Generator& random) {
  return at::randn({count, kNoise}, random, at::TensorOptions());
}

Training::Training(
    const Options& options, const Networks& networks, const examples::LabeledImages& images,
    const ddp::GroupArg& group)
    : options_(options),
      sampler_(static_cast<size_t>(images.labels.size(0)), sampler_options(options, group.get())),
      loader_(torch::data::make_data_loader(
          examples::ImageDataset(images, kPixels, network_size(images)), sampler_,
          options.batch_size)),
      // Each rank has its own noise; otherwise the ranks would make the same samples.
      random_(make_random_generator(options.seed, 1 + ddp::get_rank(group))),
      generator_(networks.generator, wrapper_options(group.get())),
      discriminator_(networks.discriminator, wrapper_options(group.get())),
      generator_optimizer_(generator_->parameters(), adam(options)),
      discriminator_optimizer_(discriminator_->parameters(), adam(options)) {
  if (options.ema == 0) return;
  const auto average = ddp::AveragedModelOptions().ema(options.ema).warmup(true).use_buffers(true);
  average_.emplace(*generator_->module(), average);
}

Losses Training::epoch(int64_t epoch, const std::function<void(int64_t, int64_t)>& on_step) {
  sampler_.set_epoch(static_cast<size_t>(epoch));
  generator_->train();
  discriminator_->train();
  const auto like = generator_->parameters().front().options();
  const auto batch_size = static_cast<int64_t>(options_.batch_size);
  const int64_t steps = (static_cast<int64_t>(sampler_.size()) + batch_size - 1) / batch_size;
  Losses mean;
  int64_t done = 0;
  for (auto& batch : *loader_) {
    const auto noise = draw_noise(batch.data.size(0), random_);
    const auto losses = step(batch.data.to(like), noise.to(like));
    mean.discriminator += losses.discriminator / static_cast<double>(steps);
    mean.generator += losses.generator / static_cast<double>(steps);
    if (on_step) on_step(++done, steps);
  }
  return mean;
}

Losses Training::step(const at::Tensor& real, const at::Tensor& noise) {
  // Both steps learn from the same samples, which costs one pass of the generator.
  const auto fake = generator_->forward(noise);
  Losses losses;
  losses.discriminator = discriminator_step(real, fake.detach());
  losses.generator = generator_step(fake);
  return losses;
}

double Training::discriminator_step(const at::Tensor& real, const at::Tensor& fake) {
  discriminator_optimizer_.zero_grad();
  // One forward pass has one backward pass, in which each gradient is sent once.
  const auto logits = discriminator_->forward(at::cat({real, fake}));
  const auto parts = logits.split_with_sizes({real.size(0), fake.size(0)});
  const auto loss = loss_where(true, parts[0]) + loss_where(false, parts[1]);
  loss.backward();
  discriminator_optimizer_.step();
  return loss.item<double>();
}

double Training::generator_step(const at::Tensor& fake) {
  // Gradients pass through the discriminator to the generator. While frozen, the discriminator
  // computes no gradients of its own, and its wrapper averages none.
  const FrozenParameters frozen(*discriminator_);
  generator_optimizer_.zero_grad();
  const auto loss = loss_where(true, discriminator_->forward(fake));
  loss.backward();
  generator_optimizer_.step();
  if (average_) average_->update();
  return loss.item<double>();
}

at::Tensor Training::sample(const at::Tensor& noise) {
  if (!average_) return generate(noise);
  const auto guard = average_->apply();  // until the samples are there
  return generate(noise);
}

at::Tensor Training::generate(const at::Tensor& noise) {
  const c10::NoGradGuard no_grad;
  auto& generator = generator_->module();
  generator->eval();
  return generator->forward(noise.to(generator->parameters().front().options())).cpu();
}

void Training::check_replicas() {
  generator_->check_replicas({&generator_optimizer_});
  discriminator_->check_replicas({&discriminator_optimizer_});
}

}  // namespace gan
