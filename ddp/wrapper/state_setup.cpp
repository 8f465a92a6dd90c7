// Construction of a wrapper: checks, the comparison with other ranks, and setters of its parts.
#include <algorithm>
#include <unordered_set>

#include <ddp/internal/check.h>
#include <ddp/internal/text.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/utils/tensor_flatten.h>

#include "replicas/model_description.h"
#include "wrapper/optimizer_in_backward.h"
#include "wrapper/state.h"
#include "wrapper/tensor_broadcast.h"

namespace ddp {

using State = DistributedDataParallelBase::State;

namespace {

std::string outside_name(size_t i) { return ddp::str("also_average[", i, "]"); }

void check_names_to_ignore(const torch::nn::Module& module, const std::vector<std::string>& names) {
  const auto parameters = module.named_parameters();
  const auto buffers = module.named_buffers();
  for (const auto& name : names) {
    DDP_CHECK_VALUE(
        parameters.contains(name) || buffers.contains(name),
        "DistributedDataParallelOptions: expected parameters_to_ignore to name parameters or "
        "buffers of the module, got \"",
        name,
        "\". Use the full names of module->named_parameters(), without a leading \"module.\".");
  }
}

// The parameters have to be on one type of device, and the group needs a backend for it.
void check_devices(const std::vector<NamedParameter>& parameters, const ProcessGroup& group) {
  const auto& first = parameters.front();
  for (const auto& p : parameters) {
    DDP_CHECK_VALUE(
        p.tensor.device().type() == first.tensor.device().type(),
        "DistributedDataParallel: expected all parameters on one type of device, got \"",
        first.name, "\" on ", first.tensor.device(), " and \"", p.name, "\" on ", p.tensor.device(),
        ". Move the module before wrapping it.");
  }
  const auto type = first.tensor.device().type();
  const auto devices = group->getDeviceTypes();
  DDP_CHECK_VALUE(
      devices.empty() || std::any_of(
                             devices.begin(), devices.end(),
                             [&](const c10::Device& d) { return d.type() == type; }),
      "DistributedDataParallel: expected a process group with a backend for ", type,
      ", where the parameters are, got one for ", joined_by(", ", devices),
      ". Choose the backend in ProcessGroupOptions, or move the module.");
}

// Rank 0's values are sent as raw bytes, so each tensor needs a dense storage of plain numbers.
void check_layouts(const std::vector<StateTensor>& state) {
  for (const auto& s : state) {
    DDP_CHECK_VALUE(
        s.tensor.layout() == at::kStrided && !s.tensor.is_quantized(),
        "DistributedDataParallel: expected dense parameters and buffers of plain numbers, got ",
        s.is_parameter ? "parameter" : "buffer", " \"", s.name, "\" of layout ", s.tensor.layout(),
        " and dtype ", s.tensor.scalar_type(),
        ". Make it dense, or put its name into parameters_to_ignore.");
  }
}

std::optional<c10::Device> checked_input_device(
    const std::vector<c10::Device>& device_ids, const std::vector<NamedParameter>& parameters) {
  if (device_ids.empty()) return {};
  DDP_CHECK_VALUE(
      device_ids.size() == 1,
      "DistributedDataParallelOptions: expected at most one device in "
      "device_ids, got ",
      device_ids.size(), ". Run one rank per device.");
  for (const auto& p : parameters) {
    DDP_CHECK_VALUE(
        !device_ids.front().is_cpu() && p.tensor.device() == device_ids.front(),
        "DistributedDataParallelOptions: expected device_ids only for a module on that one "
        "accelerator, got ",
        device_ids.front(), " while \"", p.name, "\" is on ", p.tensor.device(),
        ". Move the module there, or leave device_ids empty.");
  }
  return device_ids.front();
}

// Checks the arguments of also_average().
void check_outside(const std::vector<at::Tensor>& tensors, const torch::nn::Module& module) {
  std::unordered_set<const void*> seen;
  for (const auto& p : module.parameters()) seen.insert(p.unsafeGetTensorImpl());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& t = tensors[i];
    DDP_CHECK_VALUE(
        t.defined() && t.is_leaf() && t.requires_grad(),
        "also_average: expected leaves that require a gradient, got at ", i,
        t.defined() ? " one that is none, or requires none. " : " an undefined tensor. ",
        "Make it with requires_grad, and give the optimizer the same tensor.");
    DDP_CHECK_VALUE(
        seen.insert(t.unsafeGetTensorImpl()).second,
        "also_average: expected tensors of no module, each once, got at ", i,
        " one that is a parameter of the model, or comes twice. Leave it out.");
  }
}

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
      wrapped_(std::move(module)),
      options_(options),
      group_(options.process_group() ? options.process_group() : default_group()),
      monitor_(monitor_of(group_)),
      forwards_(monitor_),
      ignored_(options.parameters_to_ignore().begin(), options.parameters_to_ignore().end()),
      precision_(options.mixed_precision()),
      replica_check_(options.check_replicas_every().value_or(0)),
      strays_(wrapped_),
      terms_(owner_, options_.reduction(), group_, monitor_, [this] {
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
  reducer->explain_missing([this](const auto& missing) { return explain_missing(missing); });
  reducer->set_companion(*this);
  if (hook_) reducer->register_comm_hook(hook_);
  if (optimizer_) attach_optimizer(*reducer);
  reducer_ = std::move(reducer);
  ++generation_;
  shards_.reset();
  first_pass_ = FirstPass::Pending;
  frozen_ = frozen_parameters(*wrapped_, ignored_);
  const bool shares_buffers = options_.broadcast_buffers() && group_->getSize() > 1;
  buffers_ = std::make_unique<SharedBuffers>(*wrapped_, ignored_, shares_buffers);
  watch_ = std::make_unique<ParameterWatch>(*wrapped_, ignored_);
  precision_.apply_to(module_state(*wrapped_, ignored_));
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
  const auto before = outside_;
  outside_.insert(outside_.end(), tensors.begin(), tensors.end());
  try {
    rebuild();
  } catch (...) {
    outside_ = before;
    throw;
  }
}

void State::zero_grad(bool set_to_none) {
  wrapped_->zero_grad(set_to_none);
  for (const auto& tensor : outside_) {
    at::Tensor& grad = tensor.mutable_grad();
    if (!grad.defined()) continue;
    set_to_none ? grad.reset() : void(grad = grad.detach().zero_());
  }
  if (shards_) release(*shards_);
}

std::vector<NamedParameter> State::trained() const {
  auto parameters = trained_parameters(*wrapped_, ignored_);
  for (size_t i = 0; i < outside_.size(); ++i) {
    parameters.push_back({outside_name(i), outside_[i], false, /*is_outside=*/true});
  }
  return parameters;
}

std::vector<StateTensor> State::whole_state() const {
  auto state = module_state(*wrapped_, ignored_);
  for (size_t i = 0; i < outside_.size(); ++i) state.push_back({outside_name(i), outside_[i]});
  return state;
}

std::vector<NamedParameter> State::checked_parameters() {
  DDP_CHECK_VALUE(
      wrapped_,
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
  check_names_to_ignore(*wrapped_, options_.parameters_to_ignore());
  check_outside(outside_, *wrapped_);
  auto parameters = trained();
  DDP_CHECK_VALUE(
      !parameters.empty(),
      "DistributedDataParallel is not needed when a module doesn't have any parameter that "
      "requires a gradient. Use the module itself.");
  check_devices(parameters, group_);
  check_layouts(module_state(*wrapped_, ignored_));
  precision_.check(parameters, options_.reduction() == Reduction::Mean);
  input_placement_ = {
      checked_input_device(options_.device_ids(), parameters), precision_.input_dtype()};
  return parameters;
}

void State::sync_initial_state(const std::exception_ptr& error) {
  std::vector<StateTensor> state;
  std::vector<NamedParameter> parameters;
  if (!error) {
    state = whole_state();
    parameters = trained();
  }
  // Compares first: a broadcast between different models would fail in the transport.
  check_same_on_all_ranks(
      "models", describe_model(state, parameters, options_, group_), error, group_, *monitor_);
  broadcast_model(/*source=*/0);
}

std::vector<at::Tensor> State::state_tensors() const {
  std::vector<at::Tensor> tensors;
  for (const auto& s : whole_state()) {
    if (s.is_parameter || options_.broadcast_buffers()) tensors.push_back(s.tensor);
  }
  return tensors;
}

void State::broadcast_model(int source) {
  const auto where = [source] { return ddp::str("getting the model of rank ", source); };
  monitor_->abort_on_error(where, [&] {
    // In parts, since each message is a copy: one message would need the model's size once more.
    constexpr size_t kPartBytes = size_t{32} << 20;
    for (const auto& part : torch::utils::take_tensors(state_tensors(), kPartBytes)) {
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

std::vector<MissingGradient> State::explain_missing(const std::vector<size_t>& parameters) const {
  const std::string remedy = "Call model->refresh() on every rank.";
  const auto now = wrapped_->named_parameters();
  std::vector<MissingGradient> reasons;
  for (const size_t parameter : parameters) {
    const auto& known = reducer_->parameters()[parameter];
    const auto* tensor = now.find(known.name);
    auto& reason = reasons.emplace_back();
    if (known.is_outside) continue;
    if (!tensor || !tensor->is_same(known.tensor)) {
      reason = {"replaced in the module after it was wrapped", remedy};
    } else if (!tensor->requires_grad()) {
      reason = {"frozen after the module was wrapped", remedy};
    }
  }
  return reasons;
}

}  // namespace ddp
