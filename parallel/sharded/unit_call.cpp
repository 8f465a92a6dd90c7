#include <ddp/detail/unit_call.h>

#include <algorithm>

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <ddp/fully_sharded.h>
#include <ddp/internal/call_log.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>

#include "sharded/passes/unit_nodes.h"
#include "sharded/sharded_model.h"

namespace ddp::detail {

struct UnitCall::State {
  const std::shared_ptr<torch::nn::Module> module;  // which forward may drop
  const MixedPrecisionPolicy& policy;
  std::shared_ptr<ShardedUnit> unit;
  ShardedModel::Place place;
  bool has_left = false;
  std::vector<std::pair<at::Tensor, int64_t>> inputs;  // with a graph, and their versions
};

namespace {

using ReplaceAll = c10::function_ref<void(const TensorMove&)>;

std::vector<at::Tensor> tensors_of(ReplaceAll replace_all) {
  std::vector<at::Tensor> tensors;
  const auto note = [&](const at::Tensor& tensor) {
    tensors.push_back(tensor);
    return tensor;
  };
  replace_all(note);
  return tensors;
}

void put(const std::vector<at::Tensor>& tensors, ReplaceAll replace_all) {
  auto next = tensors.begin();
  const auto replace = [&](const at::Tensor&) { return *next++; };
  replace_all(replace);
}

void cast(std::vector<at::Tensor>& tensors, std::optional<at::ScalarType> dtype) {
  if (!dtype) return;
  for (auto& tensor : tensors) {
    if (tensor.defined() && tensor.is_floating_point()) tensor = tensor.to(*dtype);
  }
}

}  // namespace

UnitCall::UnitCall(FullyShardedBase& unit) {
  DDP_CHECK(
      !unit.policy_.param_dtype() ||
          !at::autocast::is_autocast_enabled(unit.unit_->device().type()),
      "FullyShardedDataParallel: expected no autocast beside mp_policy, because both cast, got "
      "both ",
      on_rank_text(*unit.unit_->groups().shard), ". Leave one of them out.");
  const torch::nn::Module* const module = &unit;
  log_forward<torch::nn::Module>(module);
  auto place = unit.unit_->model()->enter(*unit.unit_, unit.gradient_sync_);
  state_ = std::make_unique<State>(
      State{unit.weak_from_this().lock(), unit.policy_, unit.unit_, std::move(place), false, {}});
}

UnitCall::~UnitCall() {
  if (!state_->has_left) state_->unit->model()->abandon(*state_->unit, state_->place);
}

void UnitCall::note_error() { state_->unit->model()->forward_failed(*state_->unit); }

void UnitCall::enter(ReplaceAll replace_all) {
  auto& [module, policy, unit, place, has_left, inputs] = *state_;
  auto tensors = tensors_of(replace_all);
  for (const auto& tensor : tensors) {
    if (tensor.defined() && tensor.requires_grad()) inputs.emplace_back(tensor, tensor._version());
  }
  if (policy.cast_forward_inputs()) cast(tensors, policy.param_dtype());
  put(pass_through_node(std::move(tensors), UnitEnd::Inputs, unit, place), replace_all);
}

void UnitCall::leave_with(ReplaceAll replace_all) {
  auto& [module, policy, unit, place, has_left, inputs] = *state_;
  auto tensors = tensors_of(replace_all);
  // The caller's tensor would lack the change in its graph.
  for (const auto& [input, version] : inputs) {
    DDP_CHECK(
        input._version() == version, "FullyShardedDataParallel: expected forward of ", unit->name(),
        " to leave its arguments as they are, got one that it changed in place ",
        on_rank_text(*unit->groups().shard), ". Change a clone().");
  }
  for (const auto& tensor : tensors) {
    DDP_CHECK(
        !tensor.defined() || !unit->has_memory_of(tensor),
        "FullyShardedDataParallel: expected outputs of ", unit->name(),
        " that are computed, got one that is a parameter or a view of one ",
        on_rank_text(*unit->groups().shard),
        ". Its memory is freed after forward: return a clone().");
  }
  unit->model()->check_shards_unused(place);
  cast(tensors, policy.output_dtype());
  const auto marker = unit->model()->mark_exit(unit, place);
  put(pass_through_node(std::move(tensors), UnitEnd::Outputs, unit, place, marker), replace_all);
  if (at::autocast::is_autocast_enabled(unit->device().type())) at::autocast::clear_cache();
  has_left = true;
  unit->model()->leave(*unit, place);
}

void UnitCall::check_result(bool has_no_tensors, const std::string& type) {
  DDP_CHECK(
      has_no_tensors,
      "FullyShardedDataParallel: expected a result of forward whose tensors can be replaced, got "
      "a ",
      type,
      ". Declare move_tensors() for it (ddp/move_tensors.h), or return the tensors themselves.");
}

}  // namespace ddp::detail
