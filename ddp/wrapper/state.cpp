// The wrapper's work around each pass.
#include "wrapper/state.h"

#include <algorithm>
#include <utility>

#include <c10/core/GradMode.h>
#include <ddp/internal/check.h>
#include <ddp/internal/error_text.h>
#include <ddp/internal/join_names.h>
#include <ddp/internal/text.h>
#include <torch/csrc/autograd/function.h>

#include "join/join_context.h"
#include "replicas/model_description.h"

namespace ddp {

using State = DistributedDataParallelBase::State;

State::Gradients State::gradients_of_forward() const {
  const auto needs_gradient = [](const NamedParameter& p) {
    return p.tensor.requires_grad() && !p.is_outside;
  };
  const auto any = [&](const std::vector<NamedParameter>& parameters) {
    return std::any_of(parameters.begin(), parameters.end(), needs_gradient);
  };
  // With all parameters frozen (a GAN's discriminator in the generator's step), gradients only pass
  // through the module.
  if (!c10::GradMode::is_enabled() || !(any(reducer_->parameters()) || any(frozen_))) {
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
  samples = terms_.take_samples_of_forward(samples);
  const auto gradients = gradients_of_forward();
  if (gradients == Gradients::None) return;
  warn_of_new_parameters();
  count_samples_of_forward(samples);
  terms_.begin_forward(gradients == Gradients::Averaged);
  if (gradients != Gradients::Averaged) return;
  // A pass in eval() mode need not come on every rank. One inside a reduced backward pass (a
  // checkpoint that runs forward again) belongs to that.
  if (owner_.is_training() && !reducer_->is_reducing()) forwards_.begin();
  reducer_->prepare_for_forward();
  check_frozen_parameters();
}

void State::after_forward(std::vector<at::Tensor> outputs, bool outputs_complete) {
  precision_.end_forward(outputs, outputs_complete);
  terms_.end_forward(outputs, outputs_complete);
  switch (gradients_of_forward()) {
    case Gradients::None:
      break;
    case Gradients::Local:
      reducer_->prepare_for_local_backward();
      break;
    case Gradients::Averaged:
      reducer_->prepare_for_backward({std::move(outputs), outputs_complete, terms_.known()});
      break;
  }
}

void State::forward_failed() noexcept {
  precision_.abandon_forward();
  // After a failed evaluation no other rank waits for this one, and a reduced backward pass around
  // the forward pass reports the exception itself.
  if (!trains() || reducer_->is_reducing()) return;
  note_exception("forward threw on ", /*others_wait=*/owner_.is_training());
}

void State::note_exception(const char* who_threw, bool others_wait) noexcept {
  try {
    const auto why =
        ddp::str(who_threw, monitor_->rank_text(), ": ", text_of(std::current_exception()));
    others_wait ? forwards_.fail(why) : monitor_->note_error(why);
  } catch (const std::exception&) {
    // Out of memory: the other ranks detect that this process ended, or run into their timeout.
  }
}

// Counts as a forward pass whose backward pass is averaged, although the passes that made `outputs`
// did not: they ran inside no_sync(), where ranks may run as many as they like.
void State::sync_in_backward(std::vector<at::Tensor> outputs, bool outputs_complete) {
  monitor_->check();
  forwards_.begin();
  try {
    check_outputs_to_sync(outputs);
    reducer_->prepare_for_forward();
    check_frozen_parameters();
    reducer_->prepare_for_backward(
        {std::move(outputs), outputs_complete, terms_.known(), /*only_through_outputs=*/true});
  } catch (...) {
    note_exception("sync_in_backward threw on ", /*others_wait=*/true);
    throw;
  }
}

void State::check_outputs_to_sync(const std::vector<at::Tensor>& outputs) const {
  DDP_CHECK(
      !torch::autograd::get_current_node(),
      "sync_in_backward: expected to be called before a backward pass, got a call inside one on ",
      monitor_->rank_text(), ". Call it right before backward().");
  const auto has_graph = [](const at::Tensor& t) { return t.defined() && t.grad_fn(); };
  DDP_CHECK_VALUE(
      std::any_of(outputs.begin(), outputs.end(), has_graph),
      "sync_in_backward: expected an output that has a graph, got ", outputs.size(),
      outputs.size() == 1 ? " tensor" : " tensors", " without one on ", monitor_->rank_text(),
      ". Pass what forward returned, or the loss, and not under NoGradGuard or detached.");
}

void State::end() { forwards_.restart(); }

std::vector<at::Tensor> State::all_parameters() const {
  std::vector<at::Tensor> tensors;
  for (const auto& p : reducer_->parameters()) tensors.push_back(p.tensor);
  for (const auto& p : frozen_) tensors.push_back(p.tensor);
  return tensors;
}

// Ranks without input average one model after the other, while autograd may interleave the
// gradients of two models in a different order on each rank with input.
bool State::must_wait() {
  auto* join = owner_.join_context();
  return join && !join->take_turn(owner_);
}

void State::begin(PassTerms& terms) {
  terms_.begin_backward(terms);
  compare_in_first_pass();
  warn_of_stray_tensors();
  terms_.forget_samples();
}

void State::start(int source) {
  // In a join, ranks without input have not stepped.
  if (!owner_.join_context()) {
    replica_check_.start([this] { return all_parameters(); }, *group_);
  }
  buffers_->start(source, *group_);
}

void State::finish(c10::function_ref<void(c10d::Work&)> wait) {
  buffers_->finish(wait);
  if (auto* join = owner_.join_context()) join->end_turn();
}

void State::sync_buffers(int source) {
  const auto where = [source] { return ddp::str("getting the buffers of rank ", source); };
  monitor_->abort_on_error(where, [&] {
    buffers_->start(source, *group_);
    buffers_->finish([&](c10d::Work& work) { monitor_->wait(work, where); });
  });
}

// Ranks with different communication hooks would hang. Models that were changed after they were
// wrapped would keep different parameters.
void State::compare_in_first_pass() {
  if (first_pass_ != FirstPass::Pending) return;
  first_pass_ = FirstPass::Equal;
  const auto every = options_.check_replicas_every();
  if (group_->getSize() == 1 || !(options_.init_sync() || every.value_or(0) > 0)) return;
  const auto kind = hook_     ? c10::demangle(hook_.target_type().name())
                    : shards_ ? "none, but sharded gradients"
                              : "none";
  Description mine{{"communication", "hook", kind}};
  if (every != 0) {
    const auto hash = hash_of(precision_.originals(all_parameters()));
    mine.push_back({"hash", "parameters", std::to_string(hash)});
  }
  auto by_rank = gather_if_hashes_differ("communication hooks", mine, nullptr, group_, *monitor_);
  if (by_rank.empty()) return;
  for (auto& description : by_rank) description.resize(1);
  const auto difference = describe_difference(by_rank);
  DDP_CHECK(difference.empty(), difference);
  // Only a hash is known here. The pass continues, and its end finds the parameter's name.
  first_pass_ = FirstPass::Different;
}

void State::count_samples_of_forward(std::optional<int64_t> samples) {
  try {
    terms_.count_forward(samples);
  } catch (...) {
    forward_failed();
    throw;
  }
}

void State::count_samples(int64_t samples) {
  DDP_CHECK_VALUE(
      samples >= 0, "count_samples: expected a number of samples >= 0, got ", samples,
      ". Pass the samples of the coming forward pass.");
  terms_.set_samples_of_next_forward(samples);
}

void State::warn_of_new_parameters() {
  const auto names = watch_->find_new();
  if (names.empty()) return;
  TORCH_WARN(
      "DistributedDataParallel: expected the parameters that the module had when it was wrapped, "
      "got ",
      names.size(), " more on ", monitor_->rank_text(), " (", join_names(names),
      "), whose gradients are not averaged. Call model->refresh() on every rank, and give them to "
      "the optimizer.");
}

void State::warn_of_stray_tensors() {
  if (group_->getSize() == 1) return;
  const auto tensor = strays_.find_stepped();
  if (tensor.empty()) return;
  TORCH_WARN(
      "DistributedDataParallel: expected an optimizer to step what is averaged, got a step of a "
      "tensor of no wrapped module, ",
      tensor, ", on gradients of ", monitor_->rank_text(),
      " alone, so the ranks' values drift apart. Call model->also_average({tensor}) after "
      "wrapping, "
      "unless the program averages it itself or each rank is to have its own.");
}

void State::check_frozen_parameters() {
  std::vector<std::string> unfrozen;
  for (const auto& p : frozen_) {
    if (p.tensor.requires_grad()) unfrozen.push_back(p.name);
  }
  if (unfrozen.empty()) return;
  reducer_->report_problem(
      ddp::str(
          "gradients are not averaged for ", unfrozen.size(),
          unfrozen.size() == 1 ? " parameter (" : " parameters (", join_names(unfrozen),
          ": required no gradient when the module was wrapped)"),
      "Call model->refresh() on every rank.");
}

}  // namespace ddp
