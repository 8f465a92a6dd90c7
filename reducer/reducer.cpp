// The way in: construction, arming, and what happens while autograd runs. The buckets are in
// reducer_buckets.cpp, the end of a backward pass in reducer_finish.cpp, what goes wrong in
// reducer_errors.cpp.
#include <ddp/reducer.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <ddp/internal/capabilities.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include "bucket.h"
#include "bucket_plan.h"
#include "bucket_tuner.h"
#include "forward_outputs.h"
#include "graph_search.h"
#include "past_pass.h"
#include "peer_notes.h"
#include "problem_report.h"
#include "reducer_hooks.h"
#include "status_board.h"
#include "step_recorder.h"

namespace ddp {
namespace {

bool tunes(const ReducerOptions& options) {
  return options.bucket_cap_mb() == kTuneBucketCap && options.bucket_cap_mb_list().empty();
}

const std::vector<NamedParameter>& checked(
    const std::vector<NamedParameter>& parameters, const ReducerOptions& options) {
  TORCH_CHECK_VALUE(
      !parameters.empty(),
      "Reducer: expected at least one parameter, got none. Nothing needs to be reduced.");
  TORCH_CHECK_VALUE(
      options.stats_every() >= 0,
      "Reducer: expected a number of steps, or 0 for none, for stats_every, got ",
      options.stats_every(), ".");
  for (const auto& p : parameters) {
    TORCH_CHECK_VALUE(
        p.tensor.defined() && p.tensor.is_leaf() && p.tensor.requires_grad(),
        "Reducer: expected leaf tensors that require a gradient, got \"", p.name,
        p.tensor.defined() ? "\", which does not." : "\", which is undefined.");
    TORCH_CHECK_VALUE(
        p.tensor.is_cpu() || !tunes(options),
        "Reducer: expected parameters on the CPU for bucket_cap_mb(kTuneBucketCap), got \"", p.name,
        "\" on ", p.tensor.device(),
        ". The host, which takes the times, runs ahead of a device: set a number of MiB.");
    TORCH_CHECK_VALUE(
        !p.expect_sparse || !tunes(options),
        "Reducer: expected dense gradients for bucket_cap_mb(kTuneBucketCap), got \"", p.name,
        "\", whose are sparse and take another time in each step. Set a number of MiB.");
  }
  return parameters;
}

// Whether nothing but the status makes the host wait for the end of a pass on the device.
bool can_run_ahead(c10d::ProcessGroup& group, const at::Tensor& parameter) {
  if (group.getSize() == 1) return !parameter.is_cpu();
  return capabilities_of(group, parameter.device()).waits_on_stream;
}

}  // namespace

Reducer::Reducer(
    std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      options_(options),
      caps_(bucket_caps_bytes(options.bucket_cap_mb(), options.bucket_cap_mb_list())),
      self_(std::make_shared<Reducer*>(this)),
      outputs_(std::make_unique<ForwardOutputs>()),
      slots_(checked(parameters_, options).size()),
      ready_order_(parameters_.size()),
      status_(std::make_unique<StatusBoard>(
          parameters_.size(), options.find_unused_parameters() || options.static_graph())),
      runs_ahead_(!status_->tracks_usage() && can_run_ahead(*group_, parameters_.front().tensor)),
      notes_(std::make_unique<PeerNotes>(group_)),
      recorder_(std::make_unique<StepRecorder>(
          group_->getRank(), options.stats_every(), tunes(options) ? BucketTuner::kPasses : 0)),
      used_(parameters_.size(), 0),
      known_unused_(parameters_.size(), 0) {
  const bool dynamic = options_.find_unused_parameters() && !options_.static_graph();
  if (dynamic) order_ = Order::Kept;
  if (tunes(options_) && group_->getSize() > 1) {
    tuner_ = std::make_unique<BucketTuner>(group_, parameters_.size());
    passes_to_record_ = BucketTuner::kPasses;
  }
  if (options_.static_graph()) ++passes_to_record_;  // the first one counts
  std::iota(ready_order_.begin(), ready_order_.end(), size_t{0});
  // Until it is known in which order gradients become ready, small buckets would mostly wait for
  // each other: as c10d, everything goes together in the first backward pass, unless the buckets
  // have to last.
  const bool lasting = (dynamic && !tuner_) || !options_.bucket_cap_mb_list().empty();
  build_buckets(plan_under(lasting ? caps_ : std::vector<int64_t>{kUnlimitedBytes}, {}).buckets);
  register_hooks();
  if (dynamic) search_ = std::make_unique<GraphSearch>(accumulators_);
  start_pass();
}

Reducer::~Reducer() {
  warn_of_last_pass();
  if (phase_ != Phase::Broken) notes_->report_end(pass_, waits_before_forward_);  // or it said why
  *self_ = nullptr;
  for (size_t i = 0; i < accumulators_.size(); ++i) accumulators_[i]->del_post_hook(hook_keys_[i]);
}

// What nobody comes to hear of in an error any more.
void Reducer::warn_of_last_pass() const noexcept {
  if (!past_ || past_->problems.empty() || phase_ == Phase::Broken) return;
  try {
    std::vector<std::vector<Problem>> by_rank(group_->getSize());
    by_rank[group_->getRank()] = past_->problems;
    TORCH_WARN("The last reduced backward pass was wrong. ", describe_problems(by_rank));
  } catch (const std::exception&) {
    // A warning handler that throws.
  }
}

void Reducer::register_hooks() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[i].tensor);
    hook_keys_.push_back(accumulator->add_post_hook(std::make_unique<GradientHook>(*this, i)));
    accumulators_.push_back(std::move(accumulator));  // the parameter itself holds it weakly
  }
}

ReductionStats Reducer::stats() const {
  ReductionStats stats;
  stats.steps = recorder_->steps();
  stats.rebuilds = rebuilds_;
  stats.rebuilt_at = rebuilt_at_;
  for (const auto& bucket : buckets_) {
    if (!bucket.is_sparse()) stats.bucket_bytes += static_cast<int64_t>(bucket.storage().nbytes());
  }
  stats.tuning = tuning_;
  if (tuning_) stats.tuning->measured_ms = recorder_->median_step_ms(/*after=*/rebuilt_at_);
  return stats;
}

std::vector<std::vector<size_t>> Reducer::bucket_indices() const {
  std::vector<std::vector<size_t>> indices;
  for (const auto& bucket : buckets_) indices.push_back(bucket.indices());
  return indices;
}

void Reducer::register_comm_hook(CommHook hook) {
  TORCH_CHECK_VALUE(hook, "register_comm_hook: expected a hook, got an empty function.");
  TORCH_CHECK(
      !comm_hook_,
      "register_comm_hook: a communication hook is registered already. It can be set only once; "
      "compose hooks in one function instead.");
  TORCH_CHECK(
      pass_ == 1 && phase_ != Phase::Reducing,
      "register_comm_hook: expected to be called before the first backward pass.");
  TORCH_CHECK(
      !tunes(options_),
      "register_comm_hook: expected buckets that stay the same once they are rebuilt, but "
      "bucket_cap_mb is kTuneBucketCap. Set a number of MiB.");
  comm_hook_ = std::move(hook);
  for (auto& bucket : buckets_) bucket.keep_out();
  choose_status_storage();
}

void Reducer::when_reduced(WhenReduced act) {
  TORCH_CHECK(
      !when_reduced_,
      "Reducer: expected one function to call with reduced gradients, got another.");
  when_reduced_ = std::move(act);
}

void Reducer::prepare_for_forward(int source) {
  if (torch::autograd::get_current_node()) return;
  settle();
  recorder_->begin_forward(pass_);
  if (rebuild_is_due()) rebuild_buckets(source);
}

void Reducer::prepare_for_backward(const ForwardOutcome& outcome) {
  TORCH_CHECK_WITH(DistBackendError, phase_ != Phase::Broken, broken_because_);
  if (phase_ == Phase::Reducing) return;  // a forward inside a backward pass
  // Two forwards may share one backward: what one of them does not reach the other may.
  const bool alone = phase_ != Phase::Armed;
  const bool counts = outcome.training || reduces_in_evaluation_;
  if (counts) ++training_forwards_;
  armed_by_evaluation_ = !counts && (alone || armed_by_evaluation_);
  scale_ = outcome.scale;
  start_pass();
  recorder_->expect(buckets_.size());
  if (alone) outputs_->clear();
  const auto nodes = outputs_->add(outcome.outputs, outcome.outputs_complete);
  if (search_ && alone && outcome.outputs_complete) mark_unused(nodes);
  hook_outputs(outcome.outputs);
  phase_ = Phase::Armed;
}

void Reducer::prepare_for_local_backward() {
  if (phase_ == Phase::Done || (phase_ == Phase::Armed && armed_by_evaluation_)) {
    phase_ = Phase::Local;
  }
}

void Reducer::start_pass() {
  for (auto& slot : slots_) {
    slot.fired = 0;
    slot.ready = slot.expected == 0;
  }
  for (auto& bucket : buckets_) {
    bucket.reduced.reset();
    size_t pending = 0;
    for (const size_t index : bucket.indices()) pending += slots_[index].ready ? 0 : 1;
    bucket.pending = pending;
  }
  next_bucket_ = 0;
  launch_requests_ = 0;
  ready_count_ = 0;
}

void Reducer::mark_unused(const std::vector<torch::autograd::Node*>& outputs) {
  const auto& reachable = search_->reachable(outputs);
  if (std::find(reachable.begin(), reachable.end(), 0) == reachable.end()) {
    TORCH_WARN_ONCE(
        "find_unused_parameters is set, but the outputs of this forward pass lead to every "
        "parameter. The search costs a little in each iteration, and the buckets keep the order of "
        "registration: leave it out unless other iterations skip parameters.");
  }
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (reachable[i] || slots_[i].ready) continue;
    slots_[i].ready = true;
    --buckets_[slots_[i].bucket].pending;
  }
}

// The first thing that a backward pass does is to run these, in the outermost one: parameters may
// all get their gradients in passes nested in it.
void Reducer::hook_outputs(const std::vector<at::Tensor>& outputs) {
  for (const auto& output : outputs) {
    if (!output.defined() || !output.grad_fn()) continue;
    output.grad_fn()->add_pre_hook(std::make_unique<OutputHook>(self_));
  }
}

bool Reducer::forget_discarded_gradients() {
  const auto is_set = [](char used) { return used != 0; };
  const auto has_gradient = [](const auto& p) { return p.tensor.grad().defined(); };
  if (std::none_of(used_.begin(), used_.end(), is_set) ||
      std::any_of(parameters_.begin(), parameters_.end(), has_gradient)) {
    return false;
  }
  std::fill(used_.begin(), used_.end(), 0);
  return true;
}

// A backward pass through one of this reducer's forwards begins.
void Reducer::on_output() {
  // torch::autograd::grad passes here too, but accumulates nothing.
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  const auto accumulates = [&](const auto& accumulator) {
    const auto at = wanted->find(accumulator.get());
    return at != wanted->end() && at->second.needed_;
  };
  if (wanted && !wanted->empty() &&
      std::none_of(accumulators_.begin(), accumulators_.end(), accumulates)) {
    return;
  }
  const auto phase = phase_.load();
  TORCH_CHECK_WITH(DistBackendError, phase != Phase::Broken, broken_because_);
  TORCH_CHECK(
      phase != Phase::Failed, "Reducer: the last forward or backward pass threw on ", rank_text(),
      ", so this backward pass cannot be averaged. Run a forward pass first.");
  if (phase == Phase::Armed || phase == Phase::Done) begin_backward();
}

void Reducer::on_gradient(size_t index, bool defined) {
  if (defined) used_[index] = 1;
  const auto phase = phase_.load(std::memory_order_acquire);
  // After a reduced pass, gradients that do not come from this reducer's outputs are none of its
  // business: another wrapper's, or the bare module's.
  const bool further = phase == Phase::Done && !outputs_->are_complete();
  if (phase == Phase::Armed || phase == Phase::Reducing || further) {
    begin_backward();
    count_gradient(index);
  }
}

void Reducer::begin_backward() {
  if (callback_queued_.load(std::memory_order_relaxed) || callback_queued_.exchange(true)) return;
  phase_ = Phase::Reducing;
  recorder_->begin_backward();
  if (tuner_) tuner_->begin_backward();
  reduces_in_evaluation_ = reduces_in_evaluation_ || armed_by_evaluation_;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [this, abandonment = std::make_shared<Abandonment>(self_)] {
        abandonment->called_off = true;
        finish_backward();
      });
  // Buckets of nothing but unused parameters wait for no gradient.
  if (!is_counting()) launch_ready_buckets();
}

void Reducer::count_gradient(size_t index) {
  auto& slot = slots_[index];
  ++slot.fired;
  if (is_counting() || slot.fired < slot.expected) return;
  if (slot.fired == slot.expected && !slot.ready) {
    mark_ready(index);
  } else {
    note_extra_gradient(index);
  }
}

void Reducer::mark_ready(size_t index) {
  auto& slot = slots_[index];
  slot.ready = true;
  if (tuner_) tuner_->ready(index);
  if (order_ == Order::Expected) ready_order_[ready_count_.fetch_add(1)] = index;
  if (buckets_[slot.bucket].pending.fetch_sub(1) != 1) return;
  recorder_->ready(slot.bucket);
  launch_ready_buckets();
}

void Reducer::note_extra_gradient(size_t index) {
  const auto& slot = slots_[index];
  const auto& name = parameters_[index].name;
  if (options_.static_graph()) {
    report_problem(
        c10::str(
            "Your training graph has changed in this iteration: ", name, " got gradient number ",
            slot.fired, ", after ", slot.expected, " in the first iteration"),
        "This is not compatible with static_graph set to true.");
  } else if (slot.fired > 1) {
    report_problem(
        c10::str("the gradient of ", name, " became ready twice in one backward pass"),
        "Use a parameter in only one of the backward passes that are nested in each other, or set "
        "static_graph(true) if every iteration does the same.");
  } else if (slot.bucket < next_bucket_) {
    report_problem(
        c10::str(
            "the gradient of ", name,
            " came although forward's outputs do not lead to it, when its "
            "bucket was sent already"),
        "Return from forward everything that the loss is made of.");
  }
}

// All but the last: that one carries this rank's status, which is known when autograd is done. Its
// last gradient comes about then anyway.
//
// Takes no lock: a thread that finds another one launching leaves it a request, and that one looks
// again before it goes.
void Reducer::launch_ready_buckets() {
  if (tuner_) return;  // which measures both apart
  if (launch_requests_.fetch_add(1) > 0) return;
  uint32_t served = 1;
  do {
    while (next_bucket_ + 1 < buckets_.size() && buckets_[next_bucket_].pending == 0) {
      launch(next_bucket_++);
    }
  } while (!launch_requests_.compare_exchange_strong(served, 0));
}

void Reducer::launch(size_t index) {
  RECORD_FUNCTION(c10::str("ddp::launch_bucket ", index), c10::ArrayRef<const c10::IValue>());
  const at::NoGradGuard no_grad;
  auto& bucket = buckets_[index];
  const bool last = index + 1 == buckets_.size();
  const auto* used = status_->tracks_usage() || shadowing_ ? &used_ : nullptr;
  const auto unused = shadowing_ ? Bucket::Unused::Zero : Bucket::Unused::Remember;
  or_break_off(
      [&] { return c10::str("starting bucket ", index); },
      [&] {
        if (bucket.clear_out() && last) choose_status_storage();
        if (tuner_) tuner_->begin_copy();
        auto problems = bucket.gather(scale_in_gather(bucket), used, unused);
        if (tuner_) tuner_->end_copy();
        for (auto& what : problems) {
          report_problem(
              std::move(what), "Convert it in a hook on the parameter, or the parameter.");
        }
        if (last && status_in_last_bucket_) send_status();
        recorder_->launched(index, bucket.bytes());
        start_reducing(index);
        if (on_cpu()) recorder_->let_go(index);
        if (last && !status_in_last_bucket_) send_status();
      });
}

// The mean; `scale_` is unset on all ranks or on none.
bool Reducer::averages_in_collective(const Bucket& bucket) const {
  return !scale_ && bucket.averages && !comm_hook_;
}

double Reducer::scale_in_gather(const Bucket& bucket) const {
  if (comm_hook_ || averages_in_collective(bucket)) return 1;
  return scale_.value_or(1.0 / group_->getSize());
}

void Reducer::start_reducing(size_t index) {
  auto& bucket = buckets_[index];
  if (comm_hook_) {
    const bool last = index + 1 == buckets_.size();
    GradBucket view(index, last, bucket.gradients(), bucket.views(), bucket.parameters());
    bucket.future = comm_hook_(view);
    TORCH_CHECK(bucket.future, "the communication hook returned no future");
    if (on_cpu()) recorder_->watch(index, *bucket.future);
  } else if (group_->getSize() > 1) {
    c10d::AllreduceOptions options;
    if (averages_in_collective(bucket)) options.reduceOp = c10d::ReduceOp::AVG;
    std::vector<at::Tensor> wire{bucket.is_sparse() ? bucket.gradients() : bucket.wire()};
    bucket.work = group_->allreduce(wire, options);
    if (on_cpu()) recorder_->watch(index, *bucket.work);  // NCCL's is complete when it is queued
  } else {
    recorder_->waited(index);
  }
}

void Reducer::send_status() {
  const auto forwards = shadowing_ ? std::nullopt : std::optional<uint64_t>(training_forwards_);
  {
    const std::lock_guard<std::mutex> lock(problems_mutex_);
    sent_problems_ = std::exchange(problems_, {});
  }
  status_->write(sent_problems_.size(), forwards, used_);
  if (!status_in_last_bucket_ && group_->getSize() > 1) {
    std::vector<at::Tensor> wire{status_->storage()};
    status_work_ = group_->allreduce(wire);
  }
}

void Reducer::report_problem(std::string what, std::string remedy) {
  const std::lock_guard<std::mutex> lock(problems_mutex_);
  problems_.push_back({std::move(what), std::move(remedy)});
}

}  // namespace ddp
