#include "training.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <ddp/autocast.h>
#include <ddp/gradients.h>
#include <ddp/replicas.h>
#include <torch/optim/adamw.h>

#include "../common/checkpoints.h"

namespace transformer {
namespace {

/// What this rank has of the predictions for a batch.
struct Prediction {
  at::Tensor logits;  // [n, vocabulary]; with --tp some of the vocabulary
  at::Tensor target;  // [n]; with --cp some of the characters
  at::Tensor loss;    // their mean

  Tally tally() const {
    return {loss.item<double>() * static_cast<double>(target.size(0)), 0, target.size(0)};
  }
};

/// \param model  `net`, wrapped or not.
template <typename M>
Prediction predict(M& model, const LanguageModel& net, const Batch& batch, bool amp) {
  const auto device = net->device();
  // bfloat16 has the range of float32: no GradScaler is needed.
  const ddp::AutocastGuard autocast(
      device.type(), ddp::AutocastOptions(at::kBFloat16).enabled(amp));
  const auto target = net->groups.own_positions(batch.target.to(device)).flatten();
  const auto logits = model->forward(batch.input.to(device)).flatten(0, 1);
  return {logits, target, cross_entropy(logits, target, net->vocabulary, net->groups)};
}

ddp::DistributedSamplerOptions sampler_options(const Options& options, const Groups& groups) {
  return ddp::DistributedSamplerOptions()
      .seed(options.seed)
      .num_replicas(groups.replicas)
      .rank(groups.replica);
}

ddp::DistributedDataParallelOptions wrapper_options(const Groups& groups) {
  return ddp::DistributedDataParallelOptions().gradient_as_bucket_view(true).process_group(
      groups.data);
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

Training::Training(const Options& options, const LanguageModel& net, Windows windows)
    : options_(options),
      windows_(std::move(windows)),
      sampler_(windows_.size(), sampler_options(options, net->groups)),
      model_(net, wrapper_options(net->groups)),
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
  clip_gradients();
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
  const auto prediction = predict(model_, model_->module(), batch, options_.amp);
  (prediction.loss / options_.accumulate).backward();
  tally_ += prediction.tally();
}

void Training::clip_gradients() {
  // Both count what --tp does not cut once.
  if (options_.zero > 0) {
    ddp::clip_grad_norm_(*optimizer_, options_.clip);  // which has parts of the gradients
  } else {
    ddp::clip_grad_norm_(*model_->module(), options_.clip);
  }
}

Tally Training::evaluate(const Windows& windows) {
  const c10::NoGradGuard no_grad;
  auto& net = model_->module();
  net->eval();
  ddp::DistributedEvalSampler sampler(
      windows.size(), sampler_options(options_, groups()).shuffle(false));
  Tally total;
  while (const auto indices = sampler.next(std::max<size_t>(options_.batch_size, 16))) {
    const auto prediction = predict(net, net, windows.at(*indices), options_.amp);
    const auto logits = whole_vocabulary(prediction.logits, net->vocabulary, groups());
    total += prediction.tally();
    total.correct += logits.argmax(1).eq(prediction.target).sum().item<int64_t>();
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

void Training::check_replicas() {
  model_->check_replicas();
  TORCH_CHECK(
      ddp::replicas_equal(*model_->module(), groups().tp),
      "parameters: expected the same values on all ranks of what --tp does not cut, got others on "
      "some.");
}

}  // namespace transformer
