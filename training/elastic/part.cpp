#include "elastic/part.h"

#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>
#include <ddp/muon.h>
#include <ddp/parameter_layout.h>
#include <torch/optim/lbfgs.h>

#include "elastic/flat_state.h"

namespace ddp::elastic {
namespace {

ZeroRedundancyOptimizerBase* sharded_of(detail::CheckpointPart& part) {
  return dynamic_cast<ZeroRedundancyOptimizerBase*>(part.optimizer());
}

void check_supported(const std::string& name, detail::CheckpointPart& part, bool is_per_rank) {
  const auto subject = ddp::str("Elastic::add(\"", name, "\"): ");
  if (const auto* sharded = sharded_of(part)) {
    DDP_CHECK_VALUE(
        !sharded->options().overlap(), subject,
        "expected a ZeroRedundancyOptimizer without overlap, got overlap. Leave it out of "
        "ZeroOptions.");
    DDP_CHECK_VALUE(
        !is_per_rank, subject,
        "expected a ZeroRedundancyOptimizer by add(), which knows that each rank has a part, got "
        "add_per_rank(). Call add().");
  }
  DDP_CHECK_VALUE(
      dynamic_cast<torch::optim::LBFGS*>(part.optimizer()) == nullptr, subject,
      "expected an optimizer that takes a step without a forward pass, got LBFGS. Use another.");
  const auto* muon = dynamic_cast<optim::Muon*>(part.optimizer());
  DDP_CHECK_VALUE(
      muon == nullptr || muon->process_groups().empty(), subject,
      "expected an optimizer that keeps no process group, got a Muon made from a model, whose "
      "ranks "
      "step over the group that it was made with. Make it from the matrices, which each rank then "
      "steps whole: ddp::optim::Muon(ddp::optim::split_for_muon(*model).matrices).");
  if (part.module() == nullptr) return;
  for (const auto& layout : layouts_of(*part.module())) {
    DDP_CHECK_VALUE(
        layout.sharded_over.empty(), subject, "expected a module that is whole on every rank, got ",
        "parts of \"", layout.name, "\". Use ddprun --max-restarts with a Checkpointer.");
  }
  for (const auto& parameter : part.module()->parameters()) {
    DDP_CHECK_VALUE(
        !parameter.is_meta(), subject,
        "expected parameters with values, got some on the meta device. Give them memory first.");
  }
}

}  // namespace

Part::Part(
    std::string name, detail::CheckpointPartPtr state, detail::ElasticHooks hooks, bool is_per_rank)
    : name_(std::move(name)),
      state_(std::move(state)),
      hooks_(std::move(hooks)),
      is_per_rank_(is_per_rank),
      sharded_(sharded_of(*state_)) {
  check_supported(name_, *state_, is_per_rank_);
}

Part::Follows Part::follows() const {
  if (sharded_ != nullptr) return Follows::AfterModules;
  if (!hooks_.rebind) return Follows::Never;
  return is_bulk() ? Follows::AsModule : Follows::First;
}

std::vector<c10::Device> Part::devices() const {
  std::vector<c10::Device> devices;
  if (state_->module() == nullptr) return devices;
  for (const auto& parameter : state_->module()->parameters()) {
    const bool is_known = contains(devices, parameter.device());
    if (!parameter.is_cpu() && !is_known) devices.push_back(parameter.device());
  }
  return devices;
}

void Part::rebind(const ProcessGroup& group) {
  sharded_ != nullptr ? sharded_->rebind(group) : hooks_.rebind(group);
}

c10::IValue Part::state() {
  if (sharded_ == nullptr) return state_->state();
  return detail::part_of_optimizer(*sharded_->unsharded())->state();
}

void Part::copy_buffers(
    const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) const {
  const c10::NoGradGuard no_grad;
  if (!to.empty()) at::_foreach_copy_(to, from);
}

void Part::find_buffers() {
  noted_.clear();
  if (auto* module = state_->module()) buffers_ = module->buffers();
  for (const auto& buffer : buffers_) noted_.push_back(buffer.detach().clone());
}

void Part::note() {
  if (sharded_ != nullptr) return;  // goes back to a snapshot
  if (is_bulk()) return copy_buffers(noted_, buffers_);
  if (hooks_.bookmark) {
    go_back_ = hooks_.bookmark();
  } else {
    go_back_ = [this, state = copied(state_->state())] { load(state); };
  }
}

void Part::undo() {
  copy_buffers(buffers_, noted_);
  if (go_back_) go_back_();
}

c10::IValue Part::small_state() {
  if (!is_bulk()) return state();
  c10::impl::GenericList buffers(c10::AnyType::get());
  for (const auto& buffer : buffers_) buffers.push_back(buffer.detach());
  return buffers;
}

c10::IValue Part::on_own_device(const c10::IValue& state) const {
  std::vector<at::Tensor> parameters;
  if (auto* module = state_->module()) parameters = module->parameters();
  if (auto* optimizer = state_->optimizer()) {
    for (const auto& group : optimizer->param_groups()) {
      parameters.insert(parameters.end(), group.params().begin(), group.params().end());
    }
  }
  if (parameters.empty() || parameters.front().is_cpu()) return state;
  return copied_to_device(
      state, parameters.front().device(), /*with_scalars=*/state_->module() != nullptr);
}

void Part::load(const c10::IValue& state) {
  detail::LoadContext context;
  context.subject = ddp::str("Elastic, part \"", name_, '"');
  if (sharded_ == nullptr) return state_->prepare(on_own_device(state), context).apply();
  const auto whole = sharded_->unsharded();
  detail::part_of_optimizer(*whole)->prepare(state, context).apply();
  auto& groups = sharded_->param_groups();
  for (size_t g = 0; g < groups.size(); ++g) {
    groups[g].set_options(whole->param_groups()[g].options().clone());
  }
}

void Part::load_small(const c10::IValue& state) {
  if (!is_bulk()) return load(state);
  std::vector<at::Tensor> values;
  for (const auto& value : state.toListRef()) values.push_back(value.toTensor());
  copy_buffers(buffers_, values);
}

}  // namespace ddp::elastic
