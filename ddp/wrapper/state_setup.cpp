// Construction of a wrapper: checks, the comparison with other ranks, and setters of its parts.

#include <ddp/internal/check.h>
#include <ddp/internal/tensor_broadcast.h>
#include <ddp/internal/text.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/utils/tensor_flatten.h>

#include "checks/model_checks.h"
#include "replicas/model_description.h"
#include "wrapper/optimizer_in_backward.h"
#include "wrapper/state.h"

namespace ddp {

using State = DistributedDataParallelBase::State;

namespace {

ReducerOptions reducer_options(const DistributedDataParallelOptions& options) {
  const bool tunes = options.bucket_cap_mb() == kTuneBucketCap;
  return ReducerOptions()
      .bucket_cap_mb(tunes ? std::nullopt : options.bucket_cap_mb())
      .tune_bucket_cap(tunes)
      .bucket_cap_mb_list(options.bucket_cap_mb_list())
      .find_unused_parameters(options.find_unused_parameters())
      .gradient_as_bucket_view(options.gradient_as_bucket_view())
      .lazy_bucket_allocation(options.lazy_bucket_allocation())
      .static_graph(options.static_graph())
      .stats_every(options.stats_every())
      .find_nonfinite(options.find_nonfinite());
}

// With a vote in passes of its own accord.
std::optional<int64_t> compared_every(const DistributedDataParallelOptions& options) {
  constexpr int64_t kWithVote = 50;
  const auto& every = options.check_replicas_every();
  return every || !options.vote() ? every : kWithVote;
}

}  // namespace

State::State(
    DistributedDataParallelBase& owner, std::shared_ptr<torch::nn::Module> module,
    const DistributedDataParallelOptions& options)
    : owner_(owner),
      options_(DistributedDataParallelOptions(options).process_group(GroupArg())),
      in_group_(std::make_unique<InGroup>(*this, options.process_group().get())),
      tensors_(std::move(module), options.parameters_to_ignore()),
      precision_(options.mixed_precision()),
      replica_check_(compared_every(options), options.init_sync()),
      replay_(options.replay_every()),
      strays_(tensors_.module()),
      inputs_(options.check_inputs()) {
  auto parameters = agreed_parameters(options_.init_sync() ? Sync::Values : Sync::Nothing);
  build_reducer(std::move(parameters));
}

State::~State() = default;

State::InGroup::InGroup(State& state, ProcessGroup ranks)
    : group(std::move(ranks)),
      monitor(monitor_of(group)),
      forwards(monitor),
      terms(state.owner_, state.options_.reduction(), group, monitor, [&state]() -> Reducer& {
        return *state.reducer_;
      }) {}

// An error of this rank is exchanged with the comparison of models: without that, the other ranks
// would wait for this one.
std::vector<NamedParameter> State::agreed_parameters(Sync sync) {
  std::vector<NamedParameter> parameters;
  std::exception_ptr error;
  try {
    if (sync == Sync::Descriptions) check_no_overlap();
    parameters = checked_parameters();
  } catch (const c10::Error&) {
    error = std::current_exception();
  }
  const bool compares = sync != Sync::Nothing && group()->getSize() > 1;
  if (error && !compares) std::rethrow_exception(error);
  if (compares) compare_models(error);
  if (compares && sync == Sync::Values) {
    broadcast_model(
        /*source=*/0, options_.forward_sync_buffers().has_value() || options_.broadcast_buffers());
  }
  return parameters;
}

void State::build_reducer(std::vector<NamedParameter> parameters, const BucketOrder& order) {
  auto reducer = std::make_unique<Reducer>(
      std::move(parameters), group(), reducer_options(options_), in_group_->monitor);
  if (!order.parameters.empty()) reducer->set_bucket_order(order);
  reducer->explain_missing([this](const auto& missing) {
    return tensors_.explain_missing(reducer_->parameters(), missing);
  });
  reducer->set_companion(*this);
  if (hook_) reducer->register_comm_hook(hook_);
  if (const auto dtype = precision_.reduction_dtype()) reducer->reduce_in(*dtype);
  if (optimizer_) attach_optimizer(*reducer);
  reducer->require_manual_finalization(finalizes_by_hand_);
  reducer_ = std::move(reducer);
  ++generation_;
  shards_.reset();
  steps_by_bucket_ = false;
  replica_check_.restart();
  replay_.restart();
  inputs_.restart();
  tensors_.remember_frozen();
  const bool shares = shares_buffers() && group()->getSize() > 1;
  buffers_ = std::make_unique<SharedBuffers>(wrapped(), tensors_.ignored(), shares);
  watch_ = std::make_unique<ParameterWatch>(wrapped(), tensors_.ignored());
  precision_.apply_to(module_state(wrapped(), tensors_.ignored()));
  const bool skips = options_.find_unused_parameters() || options_.static_graph();
  sends_after_autograd_ =
      skips && group()->getSize() > 1 && has_collectives_over(wrapped(), group());
}

void State::check_between_steps(const char* function) const {
  constexpr const char* kRule = ": expected to be called between two steps, got a call in ";
  DDP_CHECK(
      !torch::autograd::get_current_node(), function, kRule, "a backward pass on ",
      monitor().rank_text(), ". Call it after optimizer.step().");
  DDP_CHECK(
      !owner_.join_context(), function, kRule, "join() on ", monitor().rank_text(),
      ", where ranks without input take no part in it. Call it after the join.");
  DDP_CHECK(
      !reducer_->awaits_finalization(), function, kRule,
      "a backward pass that is not finalized on ", monitor().rank_text(),
      ". Call it after finalize_backward().");
}

void State::require_manual_finalization(bool required) {
  reducer_->require_manual_finalization(required);
  finalizes_by_hand_ = required;
}

// Parameters in 16 bits get their gradients at the end of the backward pass, and models of a join
// take turns.
bool State::should_finalize_after_backward() const {
  if (!finalizes_by_hand_) return false;
  return reducer_->should_finalize_after_backward() || is_in_join() || sends_after_autograd_ ||
         options_.mixed_precision().param_dtype().has_value();
}

void State::finalize_backward() {
  DDP_CHECK(
      !torch::autograd::get_current_node() || !should_finalize_after_backward(),
      "finalize_backward: expected a call after the backward pass, where "
      "should_finalize_after_backward() is true, got one inside on ",
      monitor().rank_text(), ". Call it after backward() has returned.");
  reducer_->finalize_backward();
}

void State::rebuild() {
  monitor().check();
  build_reducer(agreed_parameters(options_.init_sync() ? Sync::Values : Sync::Nothing));
  training_forwards().restart();
  terms().forget_samples();
}

void State::refresh() {
  check_between_steps("refresh");
  reducer_->settle();
  rebuild();
}

void State::also_average(const std::vector<at::Tensor>& tensors) {
  check_between_steps("also_average");
  const auto before = tensors_.outside();
  auto all = before;
  all.insert(all.end(), tensors.begin(), tensors.end());
  tensors_.set_outside(std::move(all));
  try {
    rebuild();
  } catch (...) {
    tensors_.set_outside(before);
    throw;
  }
}

void State::zero_grad(bool set_to_none) {
  tensors_.zero_grad(set_to_none);
  if (shards_) release(*shards_);
}

std::vector<NamedParameter> State::checked_parameters() {
  DDP_CHECK_VALUE(
      tensors_.module(),
      "DistributedDataParallel: expected a module, got an empty holder. Construct it first.");
  DDP_CHECK_VALUE(
      options_.stats_every() >= 0,
      "DistributedDataParallel: expected a number of steps, or 0 for none, for stats_every, got ",
      options_.stats_every(), ".");
  DDP_CHECK_VALUE(
      options_.check_replicas_every().value_or(0) >= 0,
      "DistributedDataParallel: expected a number of steps, or 0 for none, for "
      "check_replicas_every, got ",
      options_.check_replicas_every().value_or(0), ".");
  DDP_CHECK_VALUE(
      !options_.vote() || options_.check_replicas_every() != 0,
      "DistributedDataParallel: expected passes that are compared for vote(true), got "
      "check_replicas_every(0). Leave one of them out.");
  if (const auto* own = dynamic_cast<const ModuleWithRules*>(&wrapped())) own->check();
  check_names_to_ignore(wrapped(), options_.parameters_to_ignore());
  check_not_cut(wrapped(), options_.parameters_to_ignore(), *group());
  check_outside(tensors_.outside(), wrapped());
  auto parameters = tensors_.trained();
  DDP_CHECK_VALUE(
      !parameters.empty(),
      "DistributedDataParallel is not needed when a module doesn't have any parameter that "
      "requires a gradient. Use the module itself.");
  check_devices(parameters, group());
  check_layouts(module_state(wrapped(), tensors_.ignored()));
  precision_.check(parameters, options_.reduction() == Reduction::Mean);
  check_replay(parameters);
  check_inner_wrappers(parameters);
  input_placement_ = {
      checked_input_device(options_.device_ids(), parameters), precision_.input_dtype()};
  return parameters;
}

/// Two wrappers may average a parameter, each in its own buckets, in any order. But with
/// gradients that are views of buckets, one would write into a bucket that the other one averages.
void State::check_inner_wrappers(const std::vector<NamedParameter>& parameters) const {
  for (const auto& part : wrapped().modules()) {
    const auto* inner = dynamic_cast<const DistributedDataParallelBase*>(part.get());
    if (!inner) continue;
    const auto& other = *inner->state_;
    if (!options_.gradient_as_bucket_view() && !other.options_.gradient_as_bucket_view()) continue;
    const auto averaged = other.tensors_.trained();
    for (const auto& p : parameters) {
      DDP_CHECK_VALUE(
          none_of(averaged, [&](const auto& theirs) { return theirs.tensor.is_same(p.tensor); }),
          "gradient_as_bucket_view: expected parameters that one wrapper averages, got \"", p.name,
          "\", which a wrapper inside the module averages, too. Name its parameters in "
          "parameters_to_ignore, or leave gradient_as_bucket_view out of both.");
    }
  }
}

void State::compare_models(const std::exception_ptr& error) {
  std::vector<StateTensor> state;
  std::vector<NamedParameter> parameters;
  if (!error) {
    state = tensors_.state();
    parameters = tensors_.trained();
  }
  // Compares before values are sent: a broadcast between different models would fail in the
  // transport.
  check_are_same(gather_if_hashes_differ(
      "models", describe_model(state, parameters, options_, group()), error, group(), monitor()));
}

void State::broadcast_model(int source, bool with_buffers) {
  const auto where = [source] { return ddp::str("getting the model of rank ", source); };
  monitor().abort_on_error(where, [&] {
    // In parts, since each message is a copy: one message would need the model's size once more.
    constexpr size_t kPartBytes = size_t{32} << 20;
    std::vector<at::Tensor> tensors;
    for (auto& s : tensors_.state(with_buffers)) tensors.push_back(s.tensor);
    for (const auto& part : torch::utils::take_tensors(tensors, kPartBytes)) {
      TensorBroadcast broadcast(Arrival::InPlace);
      broadcast.start(part.tensors, source, *group());
      broadcast.finish([&](c10d::Work& work) { monitor().wait(work, where); }, overwrite);
    }
  });
}

// Runs before the reducer's own check, which would complain of a second hook that the program did
// not set.
void State::check_no_low_reduction(const char* what) const {
  DDP_CHECK(
      !precision_.reduction_dtype(), what,
      ": expected gradients that are reduced as they are, got the reduction of MixedPrecision, ",
      describe(options_.mixed_precision()), ". Set its reduce_dtype(torch::kFloat).");
}

std::shared_ptr<GradientShards> State::shard_gradients() {
  check_no_low_reduction("ZeroRedundancyOptimizer of stage 2");
  DDP_CHECK(
      !optimizer_,
      "ZeroRedundancyOptimizer: expected no step_in_backward() with stage 2, got one, which would "
      "find no gradients. Leave it out, and set overlap(true).");
  shards_ = reducer_->shard_gradients();
  return shards_;
}

void State::step_in_backward(std::shared_ptr<torch::optim::Optimizer> optimizer) {
  DDP_CHECK(
      !shards_,
      "step_in_backward: expected gradients on every rank, got those of a ZeroRedundancyOptimizer "
      "of stage 2, which are not. Set overlap(true) there.");
  DDP_CHECK(
      !optimizer_,
      "step_in_backward: expected to be called once, got another optimizer. Put all parameters "
      "into groups of one.");
  std::swap(optimizer_, optimizer);
  try {
    attach_optimizer(*reducer_);
  } catch (...) {
    optimizer_.reset();
    throw;
  }
}

void State::attach_optimizer(Reducer& reducer) {
  std::vector<at::Tensor> parameters;
  for (const auto& p : reducer.parameters()) parameters.push_back(p.tensor);
  auto stepper = std::make_shared<OptimizerInBackward>(optimizer_, parameters);
  reducer.on_bucket_reduced([stepper](const auto& part, bool last) { stepper->step(part, last); });
}

void State::check_hook_fits(const char* function) const {
  check_no_low_reduction(function);
  DDP_CHECK_VALUE(
      options_.reduction() == Reduction::Mean, function,
      ": expected reduction(Reduction::Mean), since a hook decides itself what gradients become, "
      "got another one. Leave reduction out and do it in the hook.");
}

void State::register_comm_hook(CommHook hook) {
  check_hook_fits("register_comm_hook");
  reducer_->register_comm_hook(hook);
  hook_ = std::move(hook);
}

}  // namespace ddp
