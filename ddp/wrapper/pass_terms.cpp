#include "wrapper/pass_terms.h"

#include <utility>

#include <ddp/internal/check.h>

#include "join/join_context.h"

namespace ddp {

PassTermsAgreement::PassTermsAgreement(
    Joinable& model, Reduction reduction, ProcessGroup group, std::shared_ptr<GroupMonitor> monitor,
    ReducerOf reducer_of)
    : model_(model),
      reduction_(reduction),
      group_(std::move(group)),
      monitor_(std::move(monitor)),
      reducer_of_(std::move(reducer_of)) {
  if (!is_weighted()) return;
  weights_.emplace(
      model_, samples_, group_, monitor_, [this] { return reducer_of_().accumulates(); });
}

bool PassTermsAgreement::agrees_in_forward() const {
  const auto* join = JoinContext::of(model_);
  return join && join->options().throw_on_early_termination();
}

std::optional<int64_t> PassTermsAgreement::take_samples_of_forward(std::optional<int64_t> found) {
  const auto counted = std::exchange(samples_of_next_forward_, {});
  return counted ? counted : found;
}

void PassTermsAgreement::count_forward(std::optional<int64_t> samples) {
  if (!is_weighted()) return;
  forget_zeroed_samples();
  DDP_CHECK_VALUE(
      samples,
      "DistributedDataParallel: expected a tensor among forward's arguments, whose first dimension "
      "counts the samples for Reduction::SampleWeighted, got none. Say how many there are with "
      "count_samples() before forward.");
  samples_of_forward_ = static_cast<double>(*samples);
  // With early termination the ranks exchange their samples in forward, so they count at once.
  if (agrees_in_forward()) samples_.add(*samples_of_forward_);
}

void PassTermsAgreement::begin_forward(bool is_averaged) {
  auto* join = JoinContext::of(model_);
  unlisted_in_join_ = !join && group_->getSize() > 1 && JoinContext::is_in_uneven_join(group_);
  known_ = {};
  if (reduction_ == Reduction::Sum) known_.scale = 1;
  if (!agrees_in_forward()) return;
  auto mine = local_status(/*active=*/true);
  mine.reduces = is_averaged;
  const auto& round = join->begin_round(model_, JoinPlace::Event::Forward, mine);
  known_ = terms_in(round);
  known_samples_ = round.samples_by_rank();
}

void PassTermsAgreement::end_forward(const std::vector<at::Tensor>& outputs, bool complete) {
  if (const auto samples = std::exchange(samples_of_forward_, {})) {
    samples_.add_forward(*samples, outputs, complete, /*counts=*/!agrees_in_forward());
    weights_->watch(outputs);
  }
}

void PassTermsAgreement::begin_backward(PassTerms& terms) {
  DDP_CHECK(
      !unlisted_in_join_,
      "join: expected every model that is trained in the body to join, got an averaged backward "
      "pass of one that does not, for which ranks without input would not come, on ",
      monitor_->rank_text(), ". List it as well.");
  auto* join = JoinContext::of(model_);
  DDP_CHECK(
      !join || join->take_turn(model_),
      "join: expected the backward pass of one model after that of another, got one inside the "
      "other on ",
      monitor_->rank_text(), ". Run them one after the other.");
  if (agrees_in_forward()) {
    // A rank that left the pass out would answer with a collective of another size. The round finds
    // it first, and names it.
    join->begin_round(model_, JoinPlace::Event::Backward, {});
    if (is_weighted()) weights_->agree(known_samples_);
  } else if (join || is_weighted()) {
    samples_.begin_backward();
    const auto round = exchange_status();
    terms = terms_in(round);
    if (is_weighted()) weights_->agree(round.samples_by_rank());
  }
}

PassTerms PassTermsAgreement::of_joined_pass() {
  return terms_in(gather_own_samples(JoinContext::of(model_)->round(), /*active=*/false));
}

JoinRound PassTermsAgreement::exchange_status() {
  const auto mine = local_status(/*active=*/true);
  auto* join = JoinContext::of(model_);
  if (!join) return all_reduce_status(mine, group_, model_.join_device(), *monitor_);
  return gather_own_samples(
      join->begin_round(model_, JoinPlace::Event::Backward, mine), /*active=*/true);
}

// With several models, a rank without input learns only from the round which model the pass belongs
// to, so its own samples of that model are not in the round. A second all-reduce exchanges them.
JoinRound PassTermsAgreement::gather_own_samples(const JoinRound& round, bool active) {
  if (!is_weighted() || !JoinContext::of(model_)->has_several()) return round;
  return all_reduce_status(local_status(active), group_, model_.join_device(), *monitor_);
}

RankStatus PassTermsAgreement::local_status(bool active) {
  if (!active) forget_zeroed_samples();
  RankStatus status;
  status.active = active;
  status.adds = active && JoinContext::of(model_) && reducer_of_().has_averages();
  status.samples = samples_.counted();
  return status;
}

// Samples whose gradients zero_grad() discarded have no weight in the next average.
void PassTermsAgreement::forget_zeroed_samples() {
  if (reducer_of_().clear_usage_of_zeroed_grads()) forget_samples();
}

void PassTermsAgreement::forget_samples() {
  samples_.clear();
  if (is_weighted()) weights_->end();
}

PassTerms PassTermsAgreement::terms_in(const JoinRound& round) const {
  PassTerms terms;
  const auto* join = JoinContext::of(model_);
  if (join) terms.source = round.last_active();
  terms.adds = round.adds();
  switch (reduction_) {
    case Reduction::Mean:
      if (join && !join->options().divide_by_initial_world_size()) {
        terms.scale = 1.0 / round.active();
      }
      break;
    case Reduction::Sum:
      terms.scale = 1;
      break;
    case Reduction::SampleWeighted:
      terms.scale = round.samples() > 0 ? samples_.counted() / round.samples() : 0;
      // Other ranks' losses send gradients to a rank without samples, whose own is 0 times
      // something where passes go through collectives; elsewhere it may be NaN.
      if (terms.scale == 0.0 && round.samples() > 0 && weights_->mix()) {
        terms.scale = 1.0 / round.size();
      }
      break;
  }
  return terms;
}

}  // namespace ddp
