#include "training.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/autocast.h>
#include <ddp/state_dict.h>

namespace cifar10 {
namespace {

constexpr double kWarmUp = 0.1;  // of all steps
constexpr double kReferenceBatch = 128;

ddp::DistributedSamplerOptions sampler_options(
    const Options& options, const ddp::ProcessGroup& group) {
  return ddp::DistributedSamplerOptions()
      .num_replicas(ddp::get_world_size(group))
      .rank(ddp::get_rank(group))
      .seed(options.seed);
}

torch::optim::SGDOptions sgd(const Options& options) {
  return torch::optim::SGDOptions(options.lr).momentum(0.9).nesterov(true).weight_decay(5e-4);
}

struct Prediction {
  at::Tensor loss;  // mean over the images
  examples::Tally tally;
};

/// \param model  wrapped, or not.
template <typename M>
Prediction predict(M& model, const at::Tensor& images, const at::Tensor& labels, bool amp) {
  // bfloat16 has the range of float32: no GradScaler is needed.
  const ddp::AutocastGuard autocast(
      images.device().type(), ddp::AutocastOptions(at::kBFloat16).enabled(amp));
  const auto logits = model->forward(images);
  const auto loss = at::cross_entropy_loss(logits, labels);
  const auto count = labels.size(0);
  return {
      loss,
      {loss.template item<double>() * static_cast<double>(count),
       logits.argmax(1).eq(labels).sum().template item<int64_t>(), count}};
}

}  // namespace

double rate_of_step(int64_t step, int64_t total) {
  const double done = static_cast<double>(step) / static_cast<double>(total);
  if (done < kWarmUp) return (static_cast<double>(step) + 1) / (kWarmUp * total + 1);
  return 0.5 + 0.5 * std::cos(M_PI * (done - kWarmUp) / (1 - kWarmUp));
}

Training::Training(
    const Options& options, Net net, examples::LabeledImages images, const ddp::GroupArg& group)
    : options_(options),
      group_(group.get()),
      channels_(examples::measure_channels(images.images)),
      epoch_(std::make_shared<std::atomic<int64_t>>(0)),
      sampler_(static_cast<size_t>(images.labels.size(0)), sampler_options(options, group_)),
      loader_(ddp::make_prefetch_loader(
          torch::data::make_data_loader(Images(std::move(images)), sampler_, options.batch_size),
          Augmentation(channels_, options.seed, epoch_),
          ddp::PrefetchOptions().workers(options.workers))),
      model_(
          std::move(net), ddp::DistributedDataParallelOptions().process_group(group_).bucket_cap_mb(
                              options.bucket_cap_mb)),
      optimizer_(model_->parameters(), sgd(options)) {
  if (options.ema > 0) {
    const auto average =
        ddp::AveragedModelOptions().ema(options.ema).warmup(true).use_buffers(true);
    average_.emplace(*model_->module(), average);
  }
  if (options.checkpoint.empty()) return;
  checkpointer_.emplace(options.checkpoint, ddp::CheckpointerOptions().process_group(group_));
  checkpointer_->add("model", model_).add("optimizer", optimizer_);
  if (average_) checkpointer_->add("ema", *average_);
  checkpointer_->add("sampler", sampler_).add("step", step_).add_per_rank("tally", tally_);
}

// Moves images to the device and the dtype of the parameters.
at::Tensor Training::input(const at::Tensor& images) {
  return images.to(model_->module()->head->weight.options());
}

examples::Tally Training::epoch(
    int64_t epoch, const std::function<void(int64_t, int64_t)>& on_step) {
  *epoch_ = epoch;
  sampler_.set_epoch(static_cast<size_t>(epoch));
  model_->train();
  const auto batch_size = static_cast<int64_t>(options_.batch_size);
  const auto share = static_cast<int64_t>(sampler_.size());
  const int64_t steps = (share + batch_size - 1) / batch_size;
  const auto images_of_step =
      static_cast<double>(std::min(batch_size, share) * ddp::get_world_size(group_));
  const double highest = options_.lr * images_of_step / kReferenceBatch;
  for (auto& batch : *loader_) {
    const double share_of_rate = rate_of_step(epoch * steps + step_, options_.epochs * steps);
    for (auto& group : optimizer_.param_groups()) group.options().set_lr(highest * share_of_rate);
    const auto images = input(batch.images);
    const auto labels = batch.labels.to(images.device());
    optimizer_.zero_grad();
    const auto prediction = predict(model_, images, labels, options_.amp);
    prediction.loss.backward();
    optimizer_.step();
    if (average_) average_->update();
    tally_ += prediction.tally;
    sampler_.consume(batch.indices.size());  // the loader draws ahead
    ++step_;
    if (on_step) on_step(step_, steps);
  }
  step_ = 0;
  return std::exchange(tally_, {});
}

examples::Tally Training::evaluate(const examples::LabeledImages& images) {
  if (!average_) return test(images);
  const auto guard = average_->apply();  // until the images are tested
  return test(images);
}

void Training::save(const std::string& file) {
  if (!average_) return ddp::save_state_dict(*model_, file);
  const auto guard = average_->apply();
  ddp::save_state_dict(*model_, file);
}

examples::Tally Training::test(const examples::LabeledImages& images) {
  constexpr size_t kBatch = 256;
  const c10::NoGradGuard no_grad;
  auto& net = model_->module();
  net->eval();
  Images dataset(images);
  ddp::DistributedEvalSampler sampler(
      *dataset.size(), ddp::DistributedEvalSamplerOptions()
                           .num_replicas(ddp::get_world_size(group_))
                           .rank(ddp::get_rank(group_)));
  examples::Tally total;
  while (const auto indices = sampler.next(kBatch)) {
    const auto batch = dataset.get_batch(*indices);
    const auto prepared = input(examples::prepare_images(batch.images, channels_, 32));
    const auto labels = batch.labels.to(prepared.device());
    total += predict(net, prepared, labels, options_.amp).tally;
  }
  return total;
}

}  // namespace cifar10
