#include "training.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <ddp/equal_batches.h>
#include <ddp/gradients.h>
#include <ddp/replicas.h>
#include <torch/optim/adamw.h>

#include "../common/checkpoints.h"

namespace transformer {
namespace {

ddp::DistributedSamplerOptions sampler_options(const Options& options, const Groups& groups) {
  return ddp::DistributedSamplerOptions()
      .seed(options.seed)
      .num_replicas(groups.replicas)
      .rank(groups.replica);
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const Options& options, TrainedModel& model) {
  const torch::optim::AdamWOptions adamw(options.lr);
  if (options.zero == 0)
    return std::make_unique<torch::optim::AdamW>(model.module().parameters(), adamw);
  return std::make_unique<ddp::ZeroRedundancyOptimizer<torch::optim::AdamW>>(
      model.replicated(), adamw, ddp::ZeroOptions().stage(options.zero));
}

ddp::LinearLROptions warm_up(const Options& options) {
  return ddp::LinearLROptions()
      .start_factor(1.0 / static_cast<double>(options.warmup))
      .total_iters(options.warmup);
}

ddp::DiLoCoWire wire_of(const std::string& name) {
  if (name == "float32") return ddp::DiLoCoWire::Float32;
  return name == "int8" ? ddp::DiLoCoWire::Int8 : ddp::DiLoCoWire::BFloat16;
}

std::unique_ptr<ddp::DiLoCo> make_diloco(const Regions& regions, TrainedModel& model) {
  if (!regions.are_used()) return nullptr;
  const bool is_leader = ddp::get_rank(model.groups().data) == 0;
  return std::make_unique<ddp::DiLoCo>(
      model.module().parameters(), ddp::DiLoCoOptions()
                                       .sync_every(regions.sync_every)
                                       .outer_lr(regions.outer_lr)
                                       .outer_momentum(regions.outer_momentum)
                                       .fragments(regions.fragments)
                                       .overlap(regions.overlap)
                                       .wire(wire_of(regions.wire))
                                       .regions(model.groups().leaders)
                                       .coordinator(is_leader ? regions.coordinator : "")
                                       .local(model.groups().data));
}

}  // namespace

Training::Training(const Options& options, TrainedModel model, Windows windows)
    : options_(options),
      windows_(std::move(windows)),
      sampler_(windows_.size(), sampler_options(options, model.groups())),
      model_(std::move(model)),
      optimizer_(make_optimizer(options, model_)),
      warm_up_(*optimizer_, warm_up(options)),
      cosine_(*optimizer_, options.steps - options.warmup),
      schedule_(*optimizer_, {&warm_up_, &cosine_}, {options.warmup}),
      diloco_(make_diloco(options.regions, model_)) {
  if (diloco_) diloco_->add("optimizer", *optimizer_).add("schedule", schedule_);
  if (options.checkpoint.empty()) return;
  checkpointer_.emplace(
      options.checkpoint, ddp::CheckpointerOptions().every_steps(options.checkpoint_every));
  if (diloco_) {
    // Between two exchanges each region has its own.
    checkpointer_->add_per_rank("model", model_.module()).add_per_rank("optimizer", *optimizer_);
    checkpointer_->add("diloco", *diloco_);
  } else {
    checkpointer_->add("model", model_.module()).add("optimizer", *optimizer_);
  }
  checkpointer_->add("schedule", schedule_);
  checkpointer_->add("sampler", sampler_).add_per_rank("tally", tally_);
}

void Training::begin(examples::Progress& progress) {
  steps_done_ = examples::begin_run(checkpointer_, options_.checkpoint, options_.resume, progress);
  if (!diloco_) return;
  const auto step = diloco_->begin();
  if (step != steps_done_) progress.line(c10::str("joined other regions after step ", step));
  steps_done_ = step;
}

void Training::step() {
  backward();
  apply();
}

void Training::backward() {
  model_.module().train();
  ddp::zero_grad(*optimizer_);
  for (int64_t pass = 1; pass <= options_.accumulate; ++pass) {
    // Only the last pass averages, over all of them.
    tally_ += model_.backward(next_batch(), /*averages=*/pass == options_.accumulate);
  }
  clip_gradients();
}

void Training::apply() {
  optimizer_->step();
  schedule_.step();
  if (diloco_) diloco_->average_parameters(model_.module().parameters());
  ++steps_done_;
}

void Training::add_to(ddp::Elastic& run) {
  run.add("model", model_.replicated()).add("optimizer", *optimizer_).add("schedule", schedule_);
  run.add("sampler", sampler_).add_per_rank("tally", tally_);
  if (checkpointer_) run.checkpoints(*checkpointer_);
}

void Training::follow(const ddp::ElasticGeneration& generation) {
  model_.become_replica(generation.rank, generation.size);
  steps_done_ = generation.steps;
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

void Training::clip_gradients() {
  // What --tp does not cut counts once, and the table of both ends of a pipeline.
  if (options_.zero > 0) {
    ddp::clip_grad_norm_(*optimizer_, options_.clip);  // which has parts of the gradients
  } else {
    const auto& pp = groups().pp;  // whose stages have other parameters
    ddp::clip_grad_norm_(
        model_.module(), options_.clip, 2, pp ? std::vector{pp} : std::vector<ddp::ProcessGroup>());
  }
}

Tally Training::evaluate(const Windows& windows) {
  model_.module().eval();
  ddp::DistributedEvalSampler sampler(
      windows.size(), sampler_options(options_, groups()).shuffle(false));
  std::vector<std::vector<size_t>> batches;
  while (auto indices = sampler.next(std::max<size_t>(options_.batch_size, 16))) {
    batches.push_back(std::move(*indices));
  }
  auto count = static_cast<int64_t>(batches.size());
  // Forward is collective then: a rank with fewer batches repeats a window.
  if (model_.is_sharded())
    count = ddp::equal_batches(count, ddp::EqualBatches::Most, groups().data);
  Tally total;
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    const bool counts = i < batches.size();
    const auto prediction =
        model_.predict(windows.at(counts ? batches[i] : std::vector<size_t>{0}));
    if (!prediction) continue;
    const auto tally = model_.tally_of(*prediction);
    if (counts) total += tally;
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

void Training::leave_if_told(examples::LeaveOnSignal& leaving, examples::Progress& progress) {
  leaving.check(checkpointer_, steps_done_, c10::str("step ", steps_done_), progress);
}

void Training::finish() {
  if (diloco_) diloco_->finish();
  if (checkpointer_) checkpointer_->wait();
}

void Training::check_replicas() {
  model_.check_replicas();
  if (!groups().tp) return;
  TORCH_CHECK(
      ddp::replicas_equal(model_.module(), groups().tp),
      "parameters: expected the same values on all ranks of what --tp does not cut, got others on "
      "some.");
}

}  // namespace transformer
