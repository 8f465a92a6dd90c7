#include "zero/sharded_optimizer.h"

#include <ddp/internal/check.h>
#include <ddp/internal/parameter_memory.h>

#include "zero/state_tensors.h"

namespace ddp {
namespace {

// Repeated before each step: a step would not reach parameters whose data was replaced since
// (torch::load, set_data).
void move_into_memory(FlatParameters& flat) {
  for (size_t i = 0; i < flat.parameters().size(); ++i) {
    const auto& p = flat.parameters()[i];
    const auto& view = flat.views()[i];
    if (p.const_data_ptr() == view.const_data_ptr()) continue;
    DDP_CHECK(
        p.sizes() == view.sizes() && p.dtype() == view.dtype() && p.device() == view.device(),
        "ZeroRedundancyOptimizer: expected parameters of the shape, dtype and device that they had "
        "when this was made, got ",
        p.sizes(), " ", p.scalar_type(), " on ", p.device(), " in place of ", view.sizes(), " ",
        view.scalar_type(), " on ", view.device(),
        ". Call model->refresh() on every rank, and make a new optimizer.");
    flat.move_in(i);
  }
}

}  // namespace

std::vector<at::Tensor> gradients_of(const ShardChunk& chunk) {
  std::vector<at::Tensor> gradients;
  for (const auto& piece : chunk.pieces) {
    const auto& parameter = chunk.flat.parameters()[piece.slot];
    auto& gradient = gradients.emplace_back();
    if (chunk.shard) {
      if (!chunk.shard->arrived[piece.slot]) continue;
      gradient = chunk.shard->average.narrow(0, piece.at, piece.numel);
    } else if (parameter.grad().defined()) {
      gradient = memory_order_of(parameter.grad(), parameter).narrow(0, piece.from, piece.numel);
    }
  }
  return gradients;
}

ShardedOptimizer::ShardedOptimizer(
    ProcessGroup group, std::vector<std::vector<at::Tensor>> chunks, const Groups& groups,
    const torch::optim::OptimizerOptions& defaults, detail::ZeroKind kind)
    : group_(std::move(group)), kind_(std::move(kind)) {
  const at::NoGradGuard no_grad;
  std::unordered_map<const void*, size_t> group_of;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const auto& p : groups[g].params()) group_of[p.unsafeGetTensorImpl()] = g;
  }
  std::vector<std::vector<at::Tensor>> values(groups.size());
  for (auto& parameters : chunks) {
    auto& chunk = chunks_.emplace_back(ShardChunk{FlatParameters(group_, std::move(parameters))});
    const auto& flat = chunk.flat;
    for (const auto& piece : flat.layout().pieces(group_->getRank())) {
      const auto found = group_of.find(flat.parameters()[piece.slot].unsafeGetTensorImpl());
      if (found == group_of.end()) continue;
      chunk.pieces.push_back(piece);
      chunk.values.push_back(flat.shard().narrow(0, piece.at, piece.numel).detach());
      values[found->second].push_back(chunk.values.back());
    }
  }
  Groups own;
  for (size_t g = 0; g < groups.size(); ++g) {
    own.emplace_back(std::move(values[g]), groups[g].options().clone());
  }
  optimizer_ = kind_.make(own, defaults);
}

void ShardedOptimizer::set_options(const Groups& groups) {
  auto& own = optimizer_->param_groups();
  for (size_t g = 0; g < own.size(); ++g) own[g].set_options(groups[g].options().clone());
}

void ShardedOptimizer::step() {
  for (auto& chunk : chunks_) {
    move_into_memory(chunk.flat);
    const auto gradients = gradients_of(chunk);
    for (size_t i = 0; i < gradients.size(); ++i) chunk.values[i].mutable_grad() = gradients[i];
  }
  optimizer_->step();
  for (auto& chunk : chunks_) {
    for (auto& value : chunk.values) value.mutable_grad().reset();
  }
}

// The optimizer skips values without a gradient, so this steps the chunk alone.
void ShardedOptimizer::step(ShardChunk& chunk) {
  move_into_memory(chunk.flat);
  const auto gradients = gradients_of(chunk);
  for (size_t i = 0; i < gradients.size(); ++i) {
    const bool is_reduced = chunk.reported[chunk.pieces[i].slot] != 0;
    if (is_reduced) chunk.values[i].mutable_grad() = gradients[i];
  }
  optimizer_->step();
  for (auto& value : chunk.values) value.mutable_grad().reset();
}

void ShardedOptimizer::mark_changed(const ShardChunk& chunk) {
  for (const auto& p : chunk.flat.parameters()) p.unsafeGetTensorImpl()->bump_version();
}

torch::optim::OptimizerParamState* ShardedOptimizer::state_of(const at::Tensor& value) const {
  const auto found = optimizer_->state().find(value.unsafeGetTensorImpl());
  return found == optimizer_->state().end() ? nullptr : found->second.get();
}

size_t ShardedOptimizer::state_bytes() const {
  size_t bytes = 0;
  for (const auto& [key, state] : optimizer_->state()) {
    for (const auto* tensor : state_parts(*state).tensors) {
      if (tensor->defined()) bytes += tensor->nbytes();
    }
  }
  return bytes;
}

}  // namespace ddp
