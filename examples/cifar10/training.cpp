#include "training.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/serialize.h>

#include "../common/output_file.h"

namespace cifar10 {
namespace {

constexpr double kWarmUp = 0.1;  // of all steps
constexpr double kReferenceBatch = 128;

ddp::DistributedSamplerOptions sampling(const Options& options, const ddp::ProcessGroup& group) {
  return ddp::DistributedSamplerOptions()
      .num_replicas(ddp::get_world_size(group))
      .rank(ddp::get_rank(group))
      .seed(options.seed);
}

torch::optim::SGDOptions sgd(const Options& options) {
  return torch::optim::SGDOptions(options.lr).momentum(0.9).nesterov(true).weight_decay(5e-4);
}

examples::Tally tally(const at::Tensor& logits, const at::Tensor& labels, double loss_sum) {
  return {loss_sum, logits.argmax(1).eq(labels).sum().item<int64_t>(), labels.size(0)};
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
      sampler_(static_cast<size_t>(images.labels.size(0)), sampling(options, group_)),
      loader_(ddp::make_prefetch_loader(
          torch::data::make_data_loader(Images(std::move(images)), sampler_, options.batch_size),
          Augmentation(channels_, options.seed, epoch_),
          ddp::PrefetchOptions().workers(options.workers))),
      model_(
          std::move(net), ddp::DistributedDataParallelOptions().process_group(group_).bucket_cap_mb(
                              options.bucket_cap_mb)),
      optimizer_(model_->parameters(), sgd(options)) {}

// On the device, and of the type, of the parameters.
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
  examples::Tally total;
  int64_t step = 0;
  for (auto& batch : *loader_) {
    const double share_of_rate = rate_of_step(epoch * steps + step, options_.epochs * steps);
    for (auto& group : optimizer_.param_groups()) group.options().set_lr(highest * share_of_rate);
    const auto images = input(batch.images);
    const auto labels = batch.labels.to(images.device());
    optimizer_.zero_grad();
    const auto logits = model_->forward(images);
    const auto loss = at::cross_entropy_loss(logits, labels);
    loss.backward();
    optimizer_.step();
    total += tally(logits, labels, loss.item<double>() * static_cast<double>(labels.size(0)));
    if (on_step) on_step(++step, steps);
  }
  return total;
}

examples::Tally Training::evaluate(const examples::LabeledImages& images) {
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
    const auto logits = net->forward(prepared);
    const auto loss = at::cross_entropy_loss(logits, labels, {}, at::Reduction::Sum);
    total += tally(logits, labels, loss.item<double>());
  }
  return total;
}

void Training::save(const std::string& path, int64_t epochs_done) {
  examples::write_file(path, [&](const std::string& part) {
    torch::serialize::OutputArchive archive, model, optimizer;
    model_->save(model);
    optimizer_.save(optimizer);
    archive.write("network", c10::IValue(options_.model));
    archive.write("epochs", c10::IValue(epochs_done));
    archive.write("model", model);
    archive.write("optimizer", optimizer);
    archive.save_to(part);
  });
}

int64_t Training::resume(const std::string& path) {
  torch::serialize::InputArchive archive, model, optimizer;
  c10::IValue network, epochs;
  try {
    archive.load_from(path, model_->module()->head->weight.device());
    archive.read("network", network);
    archive.read("epochs", epochs);
    archive.read("model", model);
    archive.read("optimizer", optimizer);
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    TORCH_CHECK_VALUE(
        false, "--resume ", path,
        ": expected a file that --save wrote, got one that cannot be read (",
        text.substr(0, text.find('\n')), ").");
  }
  TORCH_CHECK_VALUE(
      network.toStringRef() == options_.model, "--resume ", path, ": expected a state of --model ",
      options_.model, ", got one of ", network.toStringRef(), ".");
  model_->load(model);
  optimizer_.load(optimizer);
  return epochs.toInt();
}

}  // namespace cifar10
