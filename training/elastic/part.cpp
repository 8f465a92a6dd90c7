#include "elastic/part.h"

#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>
#include <ddp/parameter_layout.h>
#include <ddp/zero.h>
#include <torch/optim/lbfgs.h>

#include "elastic/flat_state.h"

namespace ddp::elastic {
namespace {

void check_supported(const std::string& name, detail::CheckpointPart& part) {
  const auto subject = ddp::str("Elastic::add(\"", name, "\"): ");
  DDP_CHECK_VALUE(
      dynamic_cast<ZeroRedundancyOptimizerBase*>(part.optimizer()) == nullptr, subject,
      "expected an optimizer of which every rank has the whole state, got a "
      "ZeroRedundancyOptimizer, whose part of a lost rank no other rank has. Use the optimizer "
      "itself, or ddprun --max-restarts with a Checkpointer.");
  DDP_CHECK_VALUE(
      dynamic_cast<torch::optim::LBFGS*>(part.optimizer()) == nullptr, subject,
      "expected an optimizer that takes a step without a forward pass, got LBFGS. Use another.");
  if (part.module() == nullptr) return;
  for (const auto& layout : layouts_of(*part.module())) {
    DDP_CHECK_VALUE(
        layout.sharded_over.empty(), subject, "expected a module that is whole on every rank, got ",
        "parts of \"", layout.name, "\". Use ddprun --max-restarts with a Checkpointer.");
  }
  for (const auto& parameter : part.module()->parameters()) {
    DDP_CHECK_VALUE(
        parameter.device().is_cpu(), subject, "expected parameters on the CPU, got some on ",
        parameter.device(), ". Use ddprun --max-restarts with a Checkpointer.");
  }
}

}  // namespace

Part::Part(
    std::string name, detail::CheckpointPartPtr state, detail::ElasticHooks hooks, bool is_per_rank)
    : name_(std::move(name)),
      state_(std::move(state)),
      hooks_(std::move(hooks)),
      is_per_rank_(is_per_rank) {
  check_supported(name_, *state_);
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

void Part::load(const c10::IValue& state) {
  detail::LoadContext context;
  context.subject = ddp::str("Elastic, part \"", name_, '"');
  state_->prepare(state, context).apply();
}

void Part::load_small(const c10::IValue& state) {
  if (!is_bulk()) return load(state);
  std::vector<at::Tensor> values;
  for (const auto& value : state.toListRef()) values.push_back(value.toTensor());
  copy_buffers(buffers_, values);
}

}  // namespace ddp::elastic
