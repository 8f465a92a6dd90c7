// Construction of a wrapper: checks, the comparison with other ranks, and setters of its parts.

#include <ddp/internal/check.h>
#include <ddp/internal/text.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/utils/tensor_flatten.h>

#include <ddp/internal/tensor_broadcast.h>
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
      .static_graph(options.static_graph())
      .stats_every(options.stats_every());
}

}  // namespace

State::State(
    DistributedDataParallelBase& owner, std::shared_ptr<torch::nn::Module> module,
    const DistributedDataParallelOptions& options)
    : owner_(owner),
      options_(options),
      group_(options.process_group() ? options.process_group() : default_group()),
      monitor_(monitor_of(group_)),
      forwards_(monitor_),
      tensors_(std::move(module), options.parameters_to_ignore()),
      precision_(options.mixed_precision()),
      replica_check_(options.check_replicas_every(), options.init_sync()),
      strays_(tensors_.module()),
      terms_(owner_, options.reduction(), group_, monitor_, [this] {
        return reducer_->clear_usage_of_zeroed_grads();
      }) {
  auto parameters = agreed_parameters();
  hook_ = precision_.reduction_hook(group_);
  build_reducer(std::move(parameters));
}

State::~State() = default;

// An error of this rank is exchanged with the comparison of models: without that, the other ranks
// would wait for this one.
std::vector<NamedParameter> State::agreed_parameters() {
  std::vector<NamedParameter> parameters;
  std::exception_ptr error;
  try {
    parameters = checked_parameters();
  } catch (const c10::Error&) {
    error = std::current_exception();
  }
  const bool compares = options_.init_sync() && group_->getSize() > 1;
  if (error && !compares) std::rethrow_exception(error);
  if (compares) sync_initial_state(error);
  return parameters;
}

void State::build_reducer(std::vector<NamedParameter> parameters) {
  auto reducer =
      std::make_unique<Reducer>(std::move(parameters), group_, reducer_options(options_), monitor_);
  reducer->explain_missing([this](const auto& missing) {
    return tensors_.explain_missing(reducer_->parameters(), missing);
  });
  reducer->set_companion(*this);
  if (hook_) reducer->register_comm_hook(hook_);
  if (optimizer_) attach_optimizer(*reducer);
  reducer_ = std::move(reducer);
  ++generation_;
  shards_.reset();
  replica_check_.restart();
  tensors_.remember_frozen();
  const bool shares_buffers = options_.broadcast_buffers() && group_->getSize() > 1;
  buffers_ = std::make_unique<SharedBuffers>(wrapped(), tensors_.ignored(), shares_buffers);
  watch_ = std::make_unique<ParameterWatch>(wrapped(), tensors_.ignored());
  precision_.apply_to(module_state(wrapped(), tensors_.ignored()));
}

void State::check_between_steps(const char* function) const {
  constexpr const char* kRule = ": expected to be called between two steps, got a call in ";
  DDP_CHECK(
      !torch::autograd::get_current_node(), function, kRule, "a backward pass on ",
      monitor_->rank_text(), ". Call it after optimizer.step().");
  DDP_CHECK(
      !owner_.join_context(), function, kRule, "join() on ", monitor_->rank_text(),
      ", where ranks without input take no part in it. Call it after the join.");
  monitor_->check();
}

void State::rebuild() {
  build_reducer(agreed_parameters());
  forwards_.restart();
  terms_.forget_samples();
}

void State::refresh() {
  check_between_steps("refresh");
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
  check_names_to_ignore(wrapped(), options_.parameters_to_ignore());
  check_not_cut(wrapped(), options_.parameters_to_ignore(), *group_);
  check_outside(tensors_.outside(), wrapped());
  auto parameters = tensors_.trained();
  DDP_CHECK_VALUE(
      !parameters.empty(),
      "DistributedDataParallel is not needed when a module doesn't have any parameter that "
      "requires a gradient. Use the module itself.");
  check_devices(parameters, group_);
  check_layouts(module_state(wrapped(), tensors_.ignored()));
  precision_.check(parameters, options_.reduction() == Reduction::Mean);
  input_placement_ = {
      checked_input_device(options_.device_ids(), parameters), precision_.input_dtype()};
  return parameters;
}

void State::sync_initial_state(const std::exception_ptr& error) {
  std::vector<StateTensor> state;
  std::vector<NamedParameter> parameters;
  if (!error) {
    state = tensors_.state();
    parameters = tensors_.trained();
  }
  // Compares first: a broadcast between different models would fail in the transport.
  check_same_on_all_ranks(
      "models", describe_model(state, parameters, options_, group_), error, group_, *monitor_);
  broadcast_model(/*source=*/0);
}

void State::broadcast_model(int source) {
  const auto where = [source] { return ddp::str("getting the model of rank ", source); };
  monitor_->abort_on_error(where, [&] {
    // In parts, since each message is a copy: one message would need the model's size once more.
    constexpr size_t kPartBytes = size_t{32} << 20;
    std::vector<at::Tensor> tensors;
    for (auto& s : tensors_.state(options_.broadcast_buffers())) tensors.push_back(s.tensor);
    for (const auto& part : torch::utils::take_tensors(tensors, kPartBytes)) {
      TensorBroadcast broadcast(Arrival::InPlace);
      broadcast.start(part.tensors, source, *group_);
      broadcast.finish([&](c10d::Work& work) { monitor_->wait(work, where); }, overwrite);
    }
  });
}

// Runs before the reducer's own check, which would complain of a second hook that the program did
// not set.
void State::check_no_low_reduction(const char* what) const {
  DDP_CHECK(
      !precision_.reduction_hook(group_), what,
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
      "step_in_backward: expected gradients on every rank, got those of a "
      "ZeroRedundancyOptimizer of stage 2, which are not. Set overlap(true) there.");
  DDP_CHECK(
      !optimizer_,
      "step_in_backward: expected to be called once, got another optimizer. Put all "
      "parameters into groups of one.");
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

void State::register_comm_hook(CommHook hook) {
  check_no_low_reduction("register_comm_hook");
  DDP_CHECK_VALUE(
      options_.reduction() == Reduction::Mean,
      "register_comm_hook: expected reduction(Reduction::Mean), since a hook decides itself what "
      "gradients become, got another one. Leave reduction out and do it in the hook.");
  reducer_->register_comm_hook(hook);
  hook_ = std::move(hook);
}

}  // namespace ddp
