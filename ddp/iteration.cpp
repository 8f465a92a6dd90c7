// What the wrapper does around each forward pass, with input of its own or without (join).
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <ddp/distributed_data_parallel.h>

#include "join_context.h"
#include "join_round.h"
#include "module_state.h"

namespace ddp {

// What this rank's wrapper does while others have input and it has none.
class DistributedDataParallelBase::Shadow : public JoinHook {
 public:
  explicit Shadow(DistributedDataParallelBase& model) : model_(model) {}

  void main_hook() override {
    RankEntry mine;
    mine.samples = model_.samples_;
    const auto round = model_.exchange(mine);
    model_.begin_iteration(round);
    if (!round.reduces()) return;
    model_.reducer_->shadow_backward(model_.scale_in(round, model_.samples_));
    model_.samples_ = 0;
  }

  void post_hook(bool is_last_joiner) override {
    const auto round = exchange_entries(
        {is_last_joiner}, model_.group_, model_.join_device(),
        [&](c10d::Work& work) { model_.wait_in_join(work); });
    model_.broadcast_state(round.last_active());
  }

 private:
  DistributedDataParallelBase& model_;
};

std::unique_ptr<JoinHook> DistributedDataParallelBase::join_hook(const JoinOptions& /*options*/) {
  reducer_->settle();  // a rank without input comes to no forward pass that would
  // Evaluations in the join, which share nothing, shall be of one model.
  prepare_and_share_buffers(/*with_grad=*/false);
  buffers_may_differ_ = false;
  return std::make_unique<Shadow>(*this);
}

c10::Device DistributedDataParallelBase::join_device() const {
  return wrapped_->parameters().front().device();
}

void DistributedDataParallelBase::wait_in_join(c10d::Work& work) {
  reducer_->wait_before_forward(work, "what the ranks will do", /*host_reads=*/true);
}

void DistributedDataParallelBase::join_failed() noexcept {
  reducer_->report_failure("join's body");
}

bool DistributedDataParallelBase::trains() const {
  return c10::GradMode::is_enabled() && gradient_sync_;
}

void DistributedDataParallelBase::before_forward(std::optional<int64_t> samples) {
  const bool with_grad = c10::GradMode::is_enabled();
  if (with_grad) count_own_samples(samples);
  // Without gradients nothing is shared in a join: ranks evaluate as they like.
  if (join_context() && !with_grad) return;
  const bool weighted = options_.reduction() == Reduction::SampleWeighted;
  if (join_context() || (weighted && trains())) {
    const auto round = exchange({/*active=*/true, wants_buffers(), trains(), samples_});
    begin_iteration(round);
    scale_ = scale_in(round, samples_);
  } else {
    prepare_and_share_buffers(with_grad);
    scale_ = options_.reduction() == Reduction::Sum ? std::optional<double>(1) : std::nullopt;
  }
  if (!trains()) return;
  check_frozen_parameters();
  samples_ = 0;
}

JoinRound DistributedDataParallelBase::exchange(const RankEntry& mine) {
  reducer_->settle();  // or ranks that failed would not all send the same next
  auto* join = join_context();
  if (join && join->counts(*this)) {
    // The joined ranks began the round before they called any hook.
    return mine.active ? join->begin_round(mine) : join->round();
  }
  return exchange_entries(
      mine, group_, join_device(), [&](c10d::Work& work) { wait_in_join(work); });
}

// The collectives that come before a forward pass: one sequence for ranks with input and without.
void DistributedDataParallelBase::begin_iteration(const JoinRound& round) {
  const auto disagreement = round.disagreement();
  TORCH_CHECK(disagreement.empty(), disagreement);
  const int source = round.last_active();
  reducer_->prepare_for_forward(source);
  if (round.syncs_buffers()) broadcast_buffers(source, buffers_->find());
}

std::optional<double> DistributedDataParallelBase::scale_in(
    const JoinRound& round, double samples) const {
  switch (options_.reduction()) {
    case Reduction::Mean: {
      const auto* join = join_context();
      const bool by_active = join && !join->options().divide_by_initial_world_size();
      if (by_active) return 1.0 / round.active();
      return {};
    }
    case Reduction::Sum:
      return 1;
    case Reduction::SampleWeighted:
      return round.samples() > 0 ? samples / round.samples() : 0;
  }
  return {};
}

void DistributedDataParallelBase::prepare_and_share_buffers(bool with_grad) {
  const auto buffers = wants_buffers() ? buffers_->find() : std::vector<at::Tensor>();
  // Also an evaluation that gets buffers comes here first, since ranks that do not evaluate will
  // have both collectives in this order.
  if (with_grad || !buffers.empty()) reducer_->prepare_for_forward();
  broadcast_buffers(0, buffers);
}

void DistributedDataParallelBase::count_own_samples(std::optional<int64_t> found) {
  if (options_.reduction() != Reduction::SampleWeighted) return;
  try {
    // What was accumulated and then thrown away (zero_grad) has no weight in the next average.
    if (reducer_->forget_discarded_gradients()) samples_ = 0;
    samples_ += static_cast<double>(samples_of_forward(found));
  } catch (...) {
    forward_failed();
    throw;
  }
}

int64_t DistributedDataParallelBase::samples_of_forward(std::optional<int64_t> found) {
  const auto told = std::exchange(samples_of_next_forward_, {});
  TORCH_CHECK_VALUE(
      told || found,
      "DistributedDataParallel: expected a tensor among forward's arguments, whose first dimension "
      "counts the samples for Reduction::SampleWeighted, got none. Say how many there are with "
      "count_samples() before forward.");
  return told ? *told : *found;
}

void DistributedDataParallelBase::count_samples(int64_t samples) {
  TORCH_CHECK_VALUE(
      samples >= 0, "count_samples: expected a number of samples >= 0, got ", samples,
      ". Pass the samples of the coming forward pass.");
  samples_of_next_forward_ = samples;
}

void DistributedDataParallelBase::after_forward(
    std::vector<at::Tensor> outputs, bool outputs_complete) {
  const bool with_grad = c10::GradMode::is_enabled();
  // Buffers changed by a forward that is not trained on stay this rank's own until the next
  // training forward, so that one rank may evaluate alone.
  if (!join_context() || with_grad) buffers_may_differ_ = trains();
  if (trains()) {
    reducer_->prepare_for_backward({std::move(outputs), outputs_complete, scale_, is_training()});
  } else if (with_grad) {
    reducer_->prepare_for_local_backward();
  }
}

void DistributedDataParallelBase::forward_failed() noexcept {
  if (trains()) reducer_->report_failed_forward(is_training());
}

void DistributedDataParallelBase::check_frozen_parameters() {
  for (const auto& p : frozen_) {
    if (!p.tensor.requires_grad()) continue;
    reducer_->report_problem(
        c10::str(
            p.name,
            " requires a gradient now, but did not when the module was wrapped, so its "
            "gradient is not averaged"),
        "Thaw parameters before wrapping, or wrap the module again.");
  }
}

bool DistributedDataParallelBase::wants_buffers() const {
  return buffers_may_differ_ && options_.broadcast_buffers() && group_->getSize() > 1;
}

void DistributedDataParallelBase::broadcast_buffers(
    int source, const std::vector<at::Tensor>& buffers) {
  broadcast_from(source, buffers, group_, [&](c10d::Work& work) {
    reducer_->wait_before_forward(
        work, c10::str("the buffers of rank ", source), /*host_reads=*/false);
  });
}

void DistributedDataParallelBase::broadcast_state(int source) {
  std::vector<at::Tensor> tensors;
  for (const auto& s : module_state(*wrapped_, ignored_)) {
    if (s.is_parameter || options_.broadcast_buffers()) tensors.push_back(s.tensor);
  }
  broadcast_from(source, tensors, group_, [&](c10d::Work& work) {
    reducer_->wait_before_forward(
        work, c10::str("the model of rank ", source), /*host_reads=*/false);
  });
  buffers_may_differ_ = true;
}

}  // namespace ddp
