#include "training.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/autocast.h>
#include <torch/optim/adamw.h>

#include "../common/checkpoints.h"

namespace transformer {
namespace {

struct Prediction {
  at::Tensor loss;  // mean over the characters
  Tally tally;
};

/// \param model  wrapped, or not.
template <typename M>
Prediction predict(M& model, const Batch& batch, c10::Device device, bool amp) {
  // bfloat16 has the range of float32: no GradScaler is needed.
  const ddp::AutocastGuard autocast(
      device.type(), ddp::AutocastOptions(at::kBFloat16).enabled(amp));
  const auto target = batch.target.to(device).flatten();
  const auto logits = model->forward(batch.input.to(device)).flatten(0, 1);
  const auto loss = at::cross_entropy_loss(logits, target);
  const auto characters = target.size(0);
  return {
      loss,
      {loss.template item<double>() * static_cast<double>(characters),
       logits.argmax(1).eq(target).sum().template item<int64_t>(), characters}};
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Options& options, Model& model) {
  const torch::optim::AdamWOptions adamw(options.lr);
  if (options.zero == 0) return std::make_unique<torch::optim::AdamW>(model->parameters(), adamw);
  return std::make_unique<ddp::ZeroRedundancyOptimizer<torch::optim::AdamW>>(
      model, adamw, ddp::ZeroOptions().stage(options.zero));
}

ddp::LinearLROptions warm_up(const Options& options) {
  return ddp::LinearLROptions()
      .start_factor(1.0 / static_cast<double>(options.warmup))
      .total_iters(options.warmup);
}

}  // namespace

Training::Training(const Options& options, LanguageModel net, Windows windows)
    : options_(options),
      windows_(std::move(windows)),
      sampler_(windows_.size(), ddp::DistributedSamplerOptions().seed(options.seed)),
      model_(std::move(net), ddp::DistributedDataParallelOptions().gradient_as_bucket_view(true)),
      optimizer_(make_optimizer(options, model_)),
      warm_up_(*optimizer_, warm_up(options)),
      cosine_(*optimizer_, options.steps - options.warmup),
      schedule_(*optimizer_, {&warm_up_, &cosine_}, {options.warmup}) {
  if (options.checkpoint.empty()) return;
  checkpointer_.emplace(
      options.checkpoint, ddp::CheckpointerOptions().every_steps(options.checkpoint_every));
  checkpointer_->add("model", model_).add("optimizer", *optimizer_).add("schedule", schedule_);
  checkpointer_->add("sampler", sampler_).add_per_rank("tally", tally_);
}

void Training::begin(examples::Progress& progress) {
  steps_done_ = examples::begin_run(checkpointer_, options_.checkpoint, options_.resume, progress);
}

void Training::step() {
  model_->train();
  ddp::zero_grad(*optimizer_);
  for (int64_t pass = 1; pass <= options_.accumulate; ++pass) {
    if (pass < options_.accumulate) {
      const auto alone = model_->no_sync();  // only the last pass averages, over all of them
      backward(next_batch());
    } else {
      backward(next_batch());
    }
  }
  ddp::clip_grad_norm_(*optimizer_, options_.clip);
  optimizer_->step();
  schedule_.step();
  ++steps_done_;
}

// Returns the next whole batch; an epoch ends with its last whole batch.
Batch Training::next_batch() {
  auto indices = sampler_.next(options_.batch_size);
  if (!indices || indices->size() < options_.batch_size) {
    sampler_.set_epoch(sampler_.epoch() + 1);
    sampler_.reset();
    indices = sampler_.next(options_.batch_size);
  }
  return windows_.at(*indices);
}

void Training::backward(const Batch& batch) {
  const auto device = model_->module()->head->weight.device();
  const auto prediction = predict(model_, batch, device, options_.amp);
  (prediction.loss / options_.accumulate).backward();
  tally_ += prediction.tally;
}

Tally Training::evaluate(const Windows& windows) {
  const c10::NoGradGuard no_grad;
  auto& net = model_->module();
  net->eval();
  ddp::DistributedEvalSampler sampler(windows.size());
  Tally total;
  while (const auto indices = sampler.next(std::max<size_t>(options_.batch_size, 16))) {
    total += predict(net, windows.at(*indices), net->head->weight.device(), options_.amp).tally;
  }
  return total;
}

void Training::save_if_due() {
  if (!checkpointer_) return;
  if (steps_done_ == options_.steps) {
    checkpointer_->save(steps_done_);
  } else {
    checkpointer_->maybe_save(steps_done_);
  }
}

void Training::finish() {
  if (checkpointer_) checkpointer_->wait();
}

}  // namespace transformer
