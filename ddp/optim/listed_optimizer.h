// The functions of detail/listed_optimizer.h; a file with an optimizer's step instantiates them.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <ddp/detail/listed_optimizer.h>
#include <ddp/internal/check.h>
#include <ddp/internal/optimizer_kinds.h>
#include <ddp/internal/text.h>
#include <torch/optim/serialize.h>

#include "optim/archive_fields.h"
#include "optim/option_check.h"

namespace ddp::detail {

/// "ddp::optim::NAdam", by the type of its options.
template <typename Options>
std::string subject_of() {
  std::string name;
  any_optimizer_kind([&](const auto& kind) {
    if (std::is_same_v<typename std::decay_t<decltype(kind)>::Options, Options>) name = kind.name;
    return !name.empty();
  });
  return "ddp::optim::" + name;
}

/// The key in an optimizer's archive of its class, as subject_of() names it.
inline constexpr const char* kClassInArchive = "optimizer_class";

/// The result of a step's closure; undefined without one.
inline at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure) {
  const c10::AutoGradMode with_grad(true);
  return closure ? closure() : at::Tensor();
}

template <typename Options>
void ListedOptions<Options>::serialize(torch::serialize::InputArchive& archive) {
  ArchiveReader fields{archive};
  visit_options(fields, static_cast<Options&>(*this));
}

template <typename Options>
void ListedOptions<Options>::serialize(torch::serialize::OutputArchive& archive) const {
  ArchiveWriter fields{archive};
  auto own = static_cast<const Options&>(*this);
  visit_options(fields, own);
}

template <typename Options>
double ListedOptions<Options>::get_lr() const {
  return static_cast<const Options&>(*this).lr();
}

template <typename Options>
void ListedOptions<Options>::set_lr(double lr) {
  static_cast<Options&>(*this).lr(lr);
}

template <typename State, typename Options>
void ListedState<State, Options>::serialize(torch::serialize::InputArchive& archive) {
  ArchiveReader fields{archive};
  visit_state(fields, static_cast<State&>(*this), Options());
}

template <typename State, typename Options>
void ListedState<State, Options>::serialize(torch::serialize::OutputArchive& archive) const {
  ArchiveWriter fields{archive};
  auto own = static_cast<const State&>(*this);
  visit_state(fields, own, Options());
}

template <typename State>
template <typename TensorOf>
std::vector<at::Tensor> StepBatch<State>::each(TensorOf tensor_of) const {
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < states.size(); ++i) {
    auto& tensor = tensor_of(*states[i]);
    if (!tensor.defined()) tensor = at::zeros_like(parameters[i]);
    tensors.push_back(tensor);
  }
  return tensors;
}

template <typename Options, typename State>
ListedOptimizer<Options, State>::ListedOptimizer(
    const std::vector<torch::optim::OptimizerParamGroup>& groups, const Options& defaults)
    : Optimizer(groups, std::make_unique<Options>(defaults)) {
  check_options<Options>(subject_of<Options>(), *this);
}

template <typename Options, typename State>
ListedOptimizer<Options, State>::ListedOptimizer(
    std::vector<at::Tensor> parameters, const Options& defaults)
    : ListedOptimizer({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

template <typename Options, typename State>
void ListedOptimizer<Options, State>::save(torch::serialize::OutputArchive& archive) const {
  archive.write(kClassInArchive, c10::IValue(subject_of<Options>()));
  torch::optim::serialize<State, Options>(archive, *this);
}

// Several optimizers have fields of the same names. Archives of others may lack the class.
template <typename Options, typename State>
void ListedOptimizer<Options, State>::load(torch::serialize::InputArchive& archive) {
  c10::IValue saved;
  const bool has_class = archive.try_read(kClassInArchive, saved);
  DDP_CHECK_VALUE(
      !has_class || saved.toStringRef() == subject_of<Options>(), subject_of<Options>(),
      ": expected an archive of its own, got one of ", saved.toStringRef(),
      ". Load it into that optimizer.");
  torch::optim::serialize<State, Options>(archive, *this);
}

template <typename Options, typename State>
State& ListedOptimizer<Options, State>::state_of(const at::Tensor& parameter) {
  auto& slot = state()[parameter.unsafeGetTensorImpl()];
  if (!slot) slot = std::make_unique<State>();
  return static_cast<State&>(*slot);
}

template <typename Options, typename State>
at::Tensor BatchedOptimizer<Options, State>::step(torch::optim::Optimizer::LossClosure closure) {
  const auto loss = loss_of(closure);
  const c10::NoGradGuard no_grad;
  check_options<Options>(subject_of<Options>(), *this);  // groups may have been added
  check_gradients(subject_of<Options>(), *this);
  for (auto& group : this->param_groups()) {
    const auto& options = static_cast<const Options&>(group.options());
    std::map<std::tuple<std::string, at::ScalarType, int64_t>, Batch> batches;
    for (const auto& p : group.params()) {
      if (!p.grad().defined()) continue;
      auto& state = this->state_of(p);
      state.step(state.step() + 1);
      if (p.is_cpu()) {
        step_batch(options, {state.step(), {p}, {p.grad()}, {&state}});
        continue;
      }
      auto& batch = batches[{p.device().str(), p.scalar_type(), state.step()}];
      batch.step = state.step();
      batch.parameters.push_back(p);
      batch.gradients.push_back(p.grad());
      batch.states.push_back(&state);
    }
    for (const auto& [key, batch] : batches) step_batch(options, batch);
  }
  return loss;
}

}  // namespace ddp::detail

/// Instantiates the base of an optimizer, its options and its state.
#define DDP_LISTED_OPTIMIZER(Options, State)               \
  template class ddp::detail::ListedOptions<Options>;      \
  template class ddp::detail::ListedState<State, Options>; \
  template class ddp::detail::ListedOptimizer<Options, State>;
/// The same of one that steps by batches.
#define DDP_BATCHED_OPTIMIZER(Options, State) \
  DDP_LISTED_OPTIMIZER(Options, State)        \
  template class ddp::detail::BatchedOptimizer<Options, State>;
