// Builds the whole state from all ranks' parts, and this rank's part from the whole.
#include <type_traits>

#include <ATen/ops/zeros.h>
#include <ddp/collectives.h>
#include <ddp/fused_optimizer.h>
#include <ddp/internal/check.h>
#include <ddp/internal/parameter_memory.h>

#include "zero/sharded_optimizer.h"
#include "zero/state_tensors.h"

namespace ddp {
namespace {

// Columns of the state table. The columns after them say which tensors a parameter's state has.
constexpr int64_t kHasState = 0;
constexpr int64_t kStep = 1;
constexpr int64_t kTensors = 2;

}  // namespace

// One row per parameter. This rank's row is zero where it has no piece of the parameter, so the
// maximum over ranks is the row of a rank that has one.
at::Tensor ShardedOptimizer::gather_state_table() const {
  sync_step_counts(*optimizer_);
  int64_t rows = 0;
  for (const auto& chunk : chunks_) rows += static_cast<int64_t>(chunk.flat.parameters().size());
  const auto tensors = static_cast<int64_t>(state_parts(*kind_.make_state()).tensors.size());
  auto table = at::zeros({rows, kTensors + tensors}, at::kLong);
  auto cells = table.accessor<int64_t, 2>();
  int64_t first = 0;
  for (const auto& chunk : chunks_) {
    for (size_t i = 0; i < chunk.pieces.size(); ++i) {
      auto* state = state_of(chunk.values[i]);
      if (!state) continue;
      const auto row = first + static_cast<int64_t>(chunk.pieces[i].slot);
      const auto parts = state_parts(*state);
      cells[row][kHasState] = 1;
      if (parts.step) cells[row][kStep] = *parts.step;
      for (int64_t t = 0; t < tensors; ++t) {
        cells[row][kTensors + t] = parts.tensors[static_cast<size_t>(t)]->defined();
      }
    }
    first += static_cast<int64_t>(chunk.flat.parameters().size());
  }
  if (chunks_.empty()) return table;
  auto of_all_ranks = table.to(chunks_.front().flat.whole().device());
  all_reduce(of_all_ranks, c10d::ReduceOp::MAX, group_);
  return of_all_ranks.cpu();
}

at::Tensor ShardedOptimizer::gather_state(const ShardChunk& chunk, size_t part) const {
  auto own = at::zeros_like(chunk.flat.shard());
  for (size_t i = 0; i < chunk.pieces.size(); ++i) {
    auto* state = state_of(chunk.values[i]);
    if (!state) continue;
    const auto* tensor = state_parts(*state).tensors[part];
    const auto& piece = chunk.pieces[i];
    if (tensor->defined()) own.narrow(0, piece.at, piece.numel).copy_(*tensor);
  }
  auto all = at::zeros_like(chunk.flat.whole());
  all_gather_into_tensor(all, own, group_);
  return all;
}

void ShardedOptimizer::collect_state(torch::optim::Optimizer* whole) const {
  const at::NoGradGuard no_grad;
  const auto table = gather_state_table();
  const auto cells = table.accessor<int64_t, 2>();
  const auto tensors = static_cast<size_t>(table.size(1) - kTensors);
  int64_t first = 0;
  for (const auto& chunk : chunks_) {
    const auto count = static_cast<int64_t>(chunk.flat.parameters().size());
    std::vector<std::unique_ptr<torch::optim::OptimizerParamState>> states;
    for (int64_t slot = 0; slot < count; ++slot) {
      auto& state = states.emplace_back();
      if (!whole || !cells[first + slot][kHasState]) continue;
      state = kind_.make_state();
      if (auto* step = state_parts(*state).step) *step = cells[first + slot][kStep];
    }
    for (size_t t = 0; t < tensors; ++t) {
      const auto column = kTensors + static_cast<int64_t>(t);
      const auto rows = table.narrow(0, first, count).select(1, column);
      if (rows.sum().item<int64_t>() == 0) continue;
      const auto all = gather_state(chunk, t);
      if (!whole) continue;
      for (int64_t slot = 0; slot < count; ++slot) {
        if (!cells[first + slot][column]) continue;
        const auto i = static_cast<size_t>(slot);
        const auto& p = chunk.flat.parameters()[i];
        *state_parts(*states[i]).tensors[t] =
            alias(all, chunk.flat.layout().offsets[i], p.sizes(), gradient_strides(p)).clone();
      }
    }
    for (int64_t slot = 0; slot < count; ++slot) {
      auto& state = states[static_cast<size_t>(slot)];
      const auto& parameter = chunk.flat.parameters()[static_cast<size_t>(slot)];
      if (state) whole->state()[parameter.unsafeGetTensorImpl()] = std::move(state);
    }
    first += count;
  }
}

void ShardedOptimizer::load_state(const torch::optim::Optimizer& whole) {
  const at::NoGradGuard no_grad;
  // Builds the new state first: if a tensor does not fit, the old state stays.
  decltype(optimizer_->state()) current = optimizer_->state();
  std::decay_t<decltype(current)> taken;
  for (const auto& chunk : chunks_) {
    for (size_t i = 0; i < chunk.pieces.size(); ++i) {
      const auto& piece = chunk.pieces[i];
      const auto& parameter = chunk.flat.parameters()[piece.slot];
      const auto found = whole.state().find(parameter.unsafeGetTensorImpl());
      if (found == whole.state().end()) continue;
      auto state = found->second->clone();
      for (auto* tensor : state_parts(*state).tensors) {
        if (!tensor->defined()) continue;
        DDP_CHECK_VALUE(
            tensor->sizes() == parameter.sizes(),
            "ZeroRedundancyOptimizer: expected a state of the parameter's shape ",
            parameter.sizes(), ", got ", tensor->sizes(),
            ". Load the state of the same model's optimizer.");
        *tensor = memory_order_of(*tensor, parameter).narrow(0, piece.from, piece.numel).clone();
      }
      taken[chunk.values[i].unsafeGetTensorImpl()] = std::move(state);
    }
  }
  current = std::move(taken);
  reset_step_counts(*optimizer_);
}

}  // namespace ddp
