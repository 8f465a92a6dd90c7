#include <ddp/distributed_data_parallel_base.h>

#include <exception>
#include <unordered_map>

#include <ATen/core/grad_mode.h>
#include <ddp/internal/carried_hook.h>
#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize/archive.h>

#include "join/model_join_hook.h"
#include "wrapper/state.h"

namespace ddp {
namespace {

constexpr const char* kWrappedName = "module";  // as in Python

// The value to copy for a tensor of a module: during a pass in low precision, the original's.
using ValueOf = LowPrecisionParameters::ValueOf;
using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;

void copy_tensors(const NamedTensors& from, const NamedTensors& to, const ValueOf& value_of) {
  for (const auto& item : from) {
    if (!item.value().defined()) continue;
    const auto* found = to.find(item.key());
    const auto value = value_of(item.value());
    DDP_CHECK_VALUE(
        found && found->defined() && found->sizes() == value.sizes(),
        "update_snapshot: expected a copy of the wrapped module, got a module without \"",
        item.key(), "\" ", value.sizes(), ". Make it by snapshot().");
    if (found->scalar_type() == value.scalar_type()) {
      found->copy_(value);
    } else {
      found->set_data(value.to(found->device(), /*non_blocking=*/false, /*copy=*/true));
    }
  }
}

// Gives a copy of a module the values of the module's parameters and buffers.
void copy_values(
    const torch::nn::Module& module, torch::nn::Module& copy, const ValueOf& value_of) {
  const at::NoGradGuard no_grad;
  copy_tensors(module.named_parameters(), copy.named_parameters(), value_of);
  copy_tensors(module.named_buffers(), copy.named_buffers(), value_of);
}

// Writes what torch::nn::Module::save() writes, with the values of `value_of`.
void write_module(
    const torch::nn::Module& module, torch::serialize::OutputArchive& archive,
    const ValueOf& value_of) {
  for (const auto& p : module.named_parameters(/*recurse=*/false)) {
    archive.write(p.key(), value_of(p.value()));
  }
  for (const auto& b : module.named_buffers(/*recurse=*/false)) {
    archive.write(b.key(), value_of(b.value()), /*is_buffer=*/true);
  }
  for (const auto& child : module.named_children()) {
    if (!child.value()->is_serializable()) continue;
    torch::serialize::OutputArchive inner(archive.compilation_unit());
    write_module(*child.value(), inner, value_of);
    archive.write(child.key(), inner);
  }
}

// Whether a copy to `device` can leave the host free: not of what autograd records, for it does not
// record that memory is pinned.
bool can_go_through_pinned(const at::Tensor& t, const std::optional<c10::Device>& device) {
  return device && device->is_cuda() && t.is_cpu() && t.layout() == at::kStrided &&
         !t.requires_grad();
}

}  // namespace

void carry_hooks(const torch::nn::Module& from, const torch::nn::Module& to) {
  namespace impl = torch::autograd::impl;
  const auto copies = to.named_parameters();
  for (const auto& item : from.named_parameters()) {
    const auto* copy = copies.find(item.key());
    // A parameter that never required a gradient has no place for hooks.
    if (copy == nullptr || !item.value().defined() || !impl::get_autograd_meta(item.value())) {
      continue;
    }
    for (const auto& hook : impl::hooks(item.value())) {
      const auto* carried = dynamic_cast<const CarriedHook*>(hook.get());
      if (carried != nullptr) impl::add_hook(*copy, carried->copy());
    }
  }
}

at::Tensor detail::InputPlacement::placed_tensor(const at::Tensor& t) const {
  auto options = t.options();
  if (device) options = options.device(*device);
  if (floating_dtype && t.is_floating_point()) options = options.dtype(*floating_dtype);
  if (!can_go_through_pinned(t, device)) return t.to(options);
  // Dense memory keeps its order, such as channels_last, as in a plain to().
  const auto dense = t.is_non_overlapping_and_dense() ? t : t.contiguous();
  const auto pinned = dense.is_pinned() ? dense : dense.pin_memory();
  // Another dtype after the copy: before it, it would make memory that is not pinned.
  return pinned.to(*device, /*non_blocking=*/true).to(options);
}

DistributedDataParallelBase::DistributedDataParallelBase(
    std::shared_ptr<torch::nn::Module> module, const DistributedDataParallelOptions& options)
    : torch::nn::Module("DistributedDataParallel"),
      state_(std::make_unique<State>(*this, module, options)) {
  register_module(kWrappedName, std::move(module));
}

DistributedDataParallelBase::~DistributedDataParallelBase() {
  if (std::uncaught_exceptions() > 0) state_->monitor().leave_by_exception();
}

NoSyncGuard DistributedDataParallelBase::no_sync() { return NoSyncGuard(*state_->gradient_sync()); }

void DistributedDataParallelBase::sync_outputs(
    std::vector<at::Tensor> outputs, bool outputs_complete) {
  state_->sync_in_backward(std::move(outputs), outputs_complete);
}

void DistributedDataParallelBase::count_samples(int64_t samples) { state_->count_samples(samples); }

std::unique_ptr<JoinHook> DistributedDataParallelBase::join_hook(const JoinOptions& options) {
  for (const auto* optimizer : options.optimizers()) {
    DDP_CHECK_VALUE(
        optimizer && !dynamic_cast<const torch::optim::LBFGS*>(optimizer),
        "JoinOptions: expected optimizers that torch::save can write, got ",
        optimizer ? "LBFGS" : "a null pointer", " on ", state_->monitor().rank_text(),
        ". Leave it out.");
  }
  // Evaluations in the join communicate nothing, so the ranks' buffers are made equal before.
  state_->sync_buffers();
  return std::make_unique<ModelJoinHook>(*state_, options);
}

c10::Device DistributedDataParallelBase::join_device() const { return state_->device(); }

ProcessGroup DistributedDataParallelBase::join_process_group() const { return state_->group(); }

void DistributedDataParallelBase::settle() { state_->reducer().settle(); }

void DistributedDataParallelBase::sync_buffers() { state_->sync_buffers(); }

void DistributedDataParallelBase::refresh() { state_->refresh(); }

void DistributedDataParallelBase::also_average(const std::vector<at::Tensor>& tensors) {
  state_->also_average(tensors);
}

void DistributedDataParallelBase::rebind(const GroupArg& group, CommHook hook) {
  state_->rebind(group.get(), std::move(hook));
}

void DistributedDataParallelBase::zero_grad(bool set_to_none) { state_->zero_grad(set_to_none); }

void DistributedDataParallelBase::check_replicas(
    const std::vector<torch::optim::Optimizer*>& optimizers) {
  state_->check_replicas(optimizers);
}

bool DistributedDataParallelBase::offer_call() { return state_->offer_call(); }

void DistributedDataParallelBase::note_call(
    detail::CallArguments arguments, detail::RepeatCall repeat) {
  state_->note_call(std::move(arguments), std::move(repeat));
}

void DistributedDataParallelBase::also_compare(std::vector<torch::optim::Optimizer*> optimizers) {
  state_->also_compare(std::move(optimizers));
}

void DistributedDataParallelBase::register_comm_hook(CommHook hook) {
  state_->register_comm_hook(std::move(hook));
}

void DistributedDataParallelBase::step_in_backward(
    std::shared_ptr<torch::optim::Optimizer> optimizer) {
  state_->step_in_backward(std::move(optimizer));
}

void DistributedDataParallelBase::require_manual_backward_finalization(bool required) {
  state_->require_manual_finalization(required);
}

bool DistributedDataParallelBase::require_manual_backward_finalization() const {
  return state_->finalizes_by_hand();
}

bool DistributedDataParallelBase::should_finalize_after_backward() const {
  return state_->should_finalize_after_backward();
}

void DistributedDataParallelBase::finalize_backward() { state_->finalize_backward(); }

void DistributedDataParallelBase::count_trained(int64_t samples) {
  state_->reducer().count_trained(samples);
}

ReductionStats DistributedDataParallelBase::stats() const { return state_->reducer().stats(); }

void DistributedDataParallelBase::update_snapshot(torch::nn::Module& copy) const {
  state_->precision().read(
      [&](const ValueOf& value_of) { copy_values(state_->wrapped(), copy, value_of); });
}

std::vector<at::Tensor> DistributedDataParallelBase::values_of(
    const std::vector<at::Tensor>& tensors) const {
  const bool is_own = state_->precision().may_read_directly();
  std::vector<at::Tensor> values;
  state_->precision().read([&](const ValueOf& value_of) {
    values.clear();
    for (const auto& tensor : tensors) {
      values.push_back(is_own ? value_of(tensor) : value_of(tensor).clone());
    }
  });
  return values;
}

std::string DistributedDataParallelBase::clipping_error() const {
  if (!state_->has_divided_gradients()) return "";
  return ddp::str(
      "expected gradients on every rank, got those of a ZeroRedundancyOptimizer of stage 2 on ",
      state_->monitor().rank_text(), ". Call clip_grad_norm_(optimizer, max_norm).");
}

std::vector<ParameterLayout> DistributedDataParallelBase::layouts() {
  auto layouts = layouts_of(state_->wrapped());
  const auto& ignored = state_->options().parameters_to_ignore();
  for (auto& layout : layouts) {
    if (contains(ignored, layout.name)) continue;
    layout.replicated_over.push_back(state_->group());
  }
  return layouts;
}

void DistributedDataParallelBase::save(torch::serialize::OutputArchive& archive) const {
  const auto& wrapped = state_->wrapped();
  if (state_->precision().may_read_directly()) return wrapped.save(archive);
  // Saves a copy, since the archive is written to a file later, while another thread trains.
  std::shared_ptr<torch::nn::Module> copy;
  if (problem_of([&] { copy = clone(); }).empty()) return copy->save(archive);
  // A module that has no clone() is written without a save() of its own.
  auto tensors = wrapped.parameters();
  const auto buffers = wrapped.buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  const auto values = values_of(tensors);
  std::unordered_map<const void*, at::Tensor> by_tensor;
  for (size_t i = 0; i < tensors.size(); ++i) {
    by_tensor[tensors[i].unsafeGetTensorImpl()] = values[i];
  }
  write_module(wrapped, archive, [&](const at::Tensor& tensor) {
    return tensor.defined() ? by_tensor.at(tensor.unsafeGetTensorImpl()) : tensor;
  });
}

void DistributedDataParallelBase::load(torch::serialize::InputArchive& archive) {
  auto& wrapped = state_->wrapped();
  torch::serialize::InputArchive inner;
  const bool has_own = wrapped.named_children().contains(kWrappedName);
  wrapped.load(!has_own && archive.try_read(kWrappedName, inner) ? inner : archive);
}

std::shared_ptr<torch::nn::Module> DistributedDataParallelBase::clone(
    const std::optional<c10::Device>& device) const {
  std::shared_ptr<torch::nn::Module> copy;
  state_->precision().read([&](const ValueOf& value_of) {
    copy = state_->wrapped().clone(device);
    carry_hooks(state_->wrapped(), *copy);
    // During a pass, clone() copies the casts.
    if (state_->precision().replaces_parameters()) copy_values(state_->wrapped(), *copy, value_of);
  });
  return copy;
}

bool DistributedDataParallelBase::wants_inputs() const { return state_->wants_inputs(); }

void DistributedDataParallelBase::note_input_tensors(const std::vector<at::Tensor>& tensors) {
  state_->note_inputs(tensors);
}

void DistributedDataParallelBase::before_forward(std::optional<int64_t> samples) {
  state_->before_forward(samples);
}

void DistributedDataParallelBase::after_forward(
    std::vector<at::Tensor> outputs, bool outputs_complete) {
  check_forward();
  state_->after_forward(std::move(outputs), outputs_complete);
}

Reduction DistributedDataParallelBase::reduction() const { return state_->options().reduction(); }

bool DistributedDataParallelBase::counts_samples() const {
  return reduction() == Reduction::SampleWeighted;
}

void DistributedDataParallelBase::forward_failed() noexcept { state_->forward_failed(); }

void DistributedDataParallelBase::enter_forward() { state_->enter_forward(); }

const detail::InputPlacement& DistributedDataParallelBase::input_placement() const {
  return state_->input_placement();
}

}  // namespace ddp
