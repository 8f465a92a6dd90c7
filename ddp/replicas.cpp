// Whether the ranks' models are still the same.
#include <ddp/replicas.h>

#include <algorithm>

#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

#include "replica_check.h"
#include "state.h"

namespace ddp {

using State = DistributedDataParallelBase::State;

namespace {

constexpr const char* kRule =
    ". What changes parameters, buffers, learning rates or the optimizer's state has to do so on "
    "every rank alike.";
constexpr const char* kRemedy =
    " model->refresh() gives all ranks rank 0's parameters and buffers.";

}  // namespace

bool replicas_equal(const torch::nn::Module& module, const GroupArg& group) {
  if (group.get()->getSize() == 1) return true;
  const auto monitor = monitor_of(group.get());
  monitor->check();
  Description mine;
  std::exception_ptr refusal;
  try {
    for (const auto& value : replica_values(module_state(module, {}))) mine.push_back(value.item);
  } catch (const std::exception&) {
    refusal = std::current_exception();
  }
  return gather_where_different("replicas", mine, refusal, group.get(), *monitor).empty();
}

std::vector<ReplicaValue> State::values_to_check(
    const std::vector<torch::optim::Optimizer*>& optimizers) const {
  auto state = module_state(*wrapped_, ignored_);
  if (!options_.broadcast_buffers()) {
    const auto is_buffer = [](const StateTensor& s) { return !s.is_parameter; };
    state.erase(std::remove_if(state.begin(), state.end(), is_buffer), state.end());
  }
  auto values = replica_values(state);
  const auto add = [&](const torch::optim::Optimizer& optimizer) {
    for (auto& value : replica_values(optimizer, *wrapped_, ignored_))
      values.push_back(std::move(value));
  };
  if (optimizer_) add(*optimizer_);
  for (const auto* optimizer : optimizers) {
    DDP_CHECK_VALUE(
        optimizer, "check_replicas: expected optimizers, got a null pointer on ",
        monitor_->rank_text(), ". Pass {&optimizer}.");
    if (optimizer != optimizer_.get()) add(*optimizer);
  }
  return values;
}

std::string State::describe_drift(const std::vector<torch::optim::Optimizer*>& optimizers) const {
  std::vector<ReplicaValue> values;
  std::exception_ptr refusal;
  try {
    values = values_to_check(optimizers);
  } catch (const std::exception&) {
    refusal = std::current_exception();
  }
  const auto buffers = buffers_->are_own() ? Buffers::Own : Buffers::Shared;
  const auto difference = describe_replica_difference(values, buffers, refusal, group_, *monitor_);
  if (difference.empty()) return {};
  return ddp::str(
      "check_replicas: expected the same values on every rank, but ", difference, kRule,
      options_.init_sync() ? kRemedy : "");
}

void State::check_replicas(const std::vector<torch::optim::Optimizer*>& optimizers) {
  check_between_steps("check_replicas");
  if (group_->getSize() == 1) return;
  const auto drift = describe_drift(optimizers);
  if (!drift.empty()) monitor_->throw_agreed(drift);
}

std::string State::objection() {
  return replica_check_.differs(*monitor_) ? describe_drift({}) : std::string();
}

}  // namespace ddp
