// The wrapper's work around each pass.
#include "wrapper/state.h"

#include <utility>

#include <c10/core/GradMode.h>
#include <ddp/internal/call_log.h>
#include <ddp/internal/check.h>
#include <ddp/internal/current_stream.h>
#include <ddp/internal/join_names.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>
#include <torch/csrc/autograd/function.h>

#include "join/join_context.h"

namespace ddp {

using State = DistributedDataParallelBase::State;

// Where refresh() found nothing else to train.
bool State::is_for_outside() const {
  return all_of(reducer_->parameters(), [](const auto& p) { return p.is_outside; });
}

State::Gradients State::gradients_of_forward() const {
  const bool is_for_outside = this->is_for_outside();
  const auto any = [&](const std::vector<NamedParameter>& parameters) {
    return any_of(parameters, [&](const NamedParameter& p) {
      return p.tensor.requires_grad() && (is_for_outside || !p.is_outside);
    });
  };
  // With all parameters frozen (a GAN's discriminator in the generator's step), gradients only pass
  // through the module.
  if (!c10::GradMode::is_enabled() || !(any(reducer_->parameters()) || any(tensors_.frozen()))) {
    return Gradients::None;
  }
  return gradient_sync_ ? Gradients::Averaged : Gradients::Local;
}

bool State::is_in_join() const { return owner_.join_context() != nullptr; }

void State::before_forward(std::optional<int64_t> samples) {
  if (owner_.is_training()) {
    buffers_->expect_changes();
  } else if (c10::GradMode::is_enabled()) {
    buffers_->expect_reads();
  }
  samples = terms().take_samples_of_forward(samples);
  const bool is_offered = replay_.take_offer();
  const auto gradients = gradients_of_forward();
  if (gradients == Gradients::None) return;
  replay_.count_forward();
  if (const torch::nn::Module* const module = tensors_.module().get()) {
    log_forward<torch::nn::Module>(module);
  }
  if (check_stepper_ && !steps_by_bucket_) check_stepper_();
  watch_->warn_of_new(monitor());
  count_samples_of_forward(samples);
  terms().begin_forward(gradients == Gradients::Averaged);
  if (gradients == Gradients::Local) return monitor().clear_error();  // this rank goes on
  DDP_CHECK_VALUE(
      is_offered || !replay_.is_enabled(),
      "replay_every: expected calls of forward with arguments that another rank can read, got ",
      "run(), a script, or an argument of another type on ", monitor().rank_text(),
      ". Tensors, numbers, strings, and optionals, vectors, arrays, pairs, tuples and ordered maps "
      "of them can be; else leave replay_every out.");
  // A pass in eval() mode need not come on every rank. One inside a reduced backward pass (a
  // checkpoint that runs forward again) belongs to that.
  if (owner_.is_training() && !reducer_->is_reducing()) training_forwards().begin();
  reducer_->prepare_for_forward();
  check_frozen_parameters();
}

void State::after_forward(std::vector<at::Tensor> outputs, bool outputs_complete) {
  precision_.end_forward(outputs, outputs_complete);
  if (trains()) replay_.note_outputs(outputs);
  switch (gradients_of_forward()) {
    case Gradients::None:
      break;
    case Gradients::Local:
      reducer_->prepare_for_local_backward();
      break;
    case Gradients::Averaged:
      // A loss of tensors of also_average() alone does not go through the outputs.
      reducer_->prepare_for_backward(
          {outputs, outputs_complete && !is_for_outside(), terms().known()});
      break;
  }
  // After the reducer's hooks: the hooks of the program run after these, and may throw.
  const bool may_pass_by = is_for_outside() && owner_.is_training();
  terms().end_forward(outputs, outputs_complete && !may_pass_by);
}

void State::forward_failed() noexcept {
  precision_.abandon_forward();
  // A reduced backward pass around the forward pass reports the exception itself.
  if (reducer_->is_reducing()) return;
  // After a failed evaluation, or inside no_sync(), no other rank waits for this one yet.
  note_exception("forward threw on ", /*others_wait=*/trains() && owner_.is_training());
}

void State::note_exception(const char* who_threw, bool others_wait) noexcept {
  try {
    const auto why =
        ddp::str(who_threw, monitor().rank_text(), ": ", text_of(std::current_exception()));
    others_wait ? training_forwards().fail(why) : monitor().note_error(why);
  } catch (const std::exception&) {
    // Out of memory: the other ranks detect that this process ended, or run into their timeout.
  }
}

// Counts as a forward pass whose backward pass is averaged, although the passes that made `outputs`
// did not: they ran inside no_sync(), where ranks may run as many as they like.
void State::sync_in_backward(std::vector<at::Tensor> outputs, bool outputs_complete) {
  monitor().check();
  replay_.count_forward();
  training_forwards().begin();
  try {
    check_outputs_to_sync(outputs);
    reducer_->prepare_for_forward();
    check_frozen_parameters();
    reducer_->prepare_for_backward(
        {std::move(outputs), outputs_complete, terms().known(), /*only_through_outputs=*/true});
  } catch (...) {
    note_exception("sync_in_backward threw on ", /*others_wait=*/true);
    throw;
  }
}

void State::check_outputs_to_sync(const std::vector<at::Tensor>& outputs) const {
  DDP_CHECK(
      !torch::autograd::get_current_node(),
      "sync_in_backward: expected to be called before a backward pass, got a call inside one on ",
      monitor().rank_text(), ". Call it right before backward().");
  const auto has_graph = [](const at::Tensor& t) { return t.defined() && t.grad_fn(); };
  DDP_CHECK_VALUE(
      any_of(outputs, has_graph), "sync_in_backward: expected an output that has a graph, got ",
      outputs.size(), outputs.size() == 1 ? " tensor" : " tensors", " without one on ",
      monitor().rank_text(),
      ". Pass what forward returned, or the loss, and not under NoGradGuard or detached.");
}

void State::end() {
  training_forwards().restart();
  replay_.end_pass();
  replica_check_.drop();
  terms().forget_samples();
}

std::vector<at::Tensor> State::all_parameters() const {
  std::vector<at::Tensor> tensors;
  for (const auto& p : reducer_->parameters()) tensors.push_back(p.tensor);
  for (const auto& p : tensors_.frozen()) tensors.push_back(p.tensor);
  return tensors;
}

// Ranks without input average one model after the other, while autograd may interleave the
// gradients of two models in a different order on each rank with input.
bool State::must_wait() {
  auto* join = owner_.join_context();
  return (join && !join->take_turn(owner_)) || sends_after_autograd_;
}

void State::begin(PassTerms& terms) {
  in_group_->terms.begin_backward(terms);
  compare_in_first_pass();
  // In a join, ranks without input have not stepped.
  if (group()->getSize() > 1 && !owner_.join_context()) strays_.begin_backward();
}

// As a forward pass that threw: ranks of which all throw go on together. Passes in eval() mode are
// not counted, and the others wait for this rank's gradients.
void State::failed(const std::string& why) {
  owner_.is_training() ? training_forwards().fail(why) : void(monitor().fail(why));
}

void State::start(int source) {
  // In a join, ranks without input have not stepped.
  if (!owner_.join_context()) {
    if (group()->getSize() > 1) replay_if_due();
    replica_check_.start(
        device(), [this] { return all_parameters(); }, [this] { return hash_of_compared(); },
        *group());
    inputs_.start(*group(), device());
  }
  buffers_->start(source, *group());
}

bool State::offer_call() {
  if (!replay_.is_enabled()) return false;
  replay_.offer();
  return replay_.is_due() && group()->getSize() > 1 && !is_in_join() && trains();
}

void State::note_call(detail::CallArguments arguments, detail::RepeatCall repeat) {
  std::vector<at::Tensor> parameters;
  for (const auto& p : reducer_->parameters()) {
    // The gradient of a tensor of also_average() does not come from forward's outputs.
    if (p.tensor.requires_grad() && !p.is_outside) parameters.push_back(p.tensor);
  }
  replay_.note_call(std::move(arguments), std::move(repeat), wrapped(), parameters);
}

void State::replay_if_due() {
  DDP_CHECK(
      !replay_.is_enabled() || !is_capturing(device()),
      "DistributedDataParallel: expected a graph to be captured in a step without a replayed "
      "batch, got one of a model with replay_every. Leave that out.");
  replay_.run(group(), monitor());
}

void State::check_replay(const std::vector<NamedParameter>& parameters) const {
  const auto every = options_.replay_every();
  DDP_CHECK_VALUE(
      every >= 0,
      "DistributedDataParallel: expected a number of steps, or 0 for none, for replay_every, got ",
      every, ".");
  if (every == 0) return;
  constexpr const char* kSubject = "replay_every: expected ";
  const auto& precision = options_.mixed_precision();
  const bool is_mixed = precision.param_dtype() || precision.reduce_dtype();
  DDP_CHECK_VALUE(
      !is_mixed, kSubject, "parameters and gradients in their own dtypes, got ",
      describe(precision), ". Leave one of them out.");
  DDP_CHECK_VALUE(
      !has_collectives_over(wrapped(), group()), kSubject,
      "a module that communicates nothing, got a SyncBatchNorm or another one with collectives. "
      "Leave replay_every out.");
  for (const auto& p : parameters) {
    DDP_CHECK_VALUE(
        !p.expect_sparse, kSubject, "dense gradients, got sparse ones of \"", p.name,
        "\". Leave replay_every out, or sparse(false).");
  }
}

void State::finish(c10::function_ref<void(c10d::Work&)> wait) {
  buffers_->finish(wait);
  inputs_.finish(monitor(), *group());
  if (auto* join = owner_.join_context()) join->end_turn();
}

void State::sync_buffers(int source) {
  const auto where = [source] { return ddp::str("getting the buffers of rank ", source); };
  monitor().abort_on_error(where, [&] {
    buffers_->start(source, *group());
    buffers_->finish([&](c10d::Work& work) { monitor().wait(work, where); });
  });
}

// Models that were changed after they were wrapped would keep different parameters.
void State::compare_in_first_pass() {
  replica_check_.compare_first(
      [this]() -> std::string {
        if (hook_) return c10::demangle(hook_.target_type().name());
        return shards_ ? "none, but sharded gradients" : "none";
      },
      [this] { return precision_.originals(all_parameters()); }, group(), monitor());
}

void State::count_samples_of_forward(std::optional<int64_t> samples) {
  try {
    terms().count_forward(samples);
  } catch (...) {
    forward_failed();
    throw;
  }
}

void State::count_samples(int64_t samples) {
  DDP_CHECK_VALUE(
      samples >= 0, "count_samples: expected a number of samples >= 0, got ", samples,
      ". Pass the samples of the coming forward pass.");
  terms().set_samples_of_next_forward(samples);
}

void State::check_frozen_parameters() {
  const auto unfrozen = tensors_.unfrozen();
  if (unfrozen.empty()) return;
  reducer_->report_problem(
      ddp::str(
          "gradients are not averaged for ", unfrozen.size(),
          unfrozen.size() == 1 ? " parameter (" : " parameters (", join_names(unfrozen),
          ": required no gradient when the module was wrapped)"),
      "Call model->refresh() on every rank.");
}

}  // namespace ddp
