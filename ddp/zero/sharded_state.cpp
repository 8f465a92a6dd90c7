// The state of a sharded optimizer: the whole is built from all ranks' parts, or divided into them,
// and ranks take pieces of other ranks' parts.
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/bit_cast.h>
#include <ddp/collectives.h>
#include <ddp/internal/check.h>
#include <ddp/internal/optimizer_kinds.h>
#include <ddp/internal/parameter_memory.h>

#include "zero/sharded_optimizer.h"

namespace ddp {
namespace {

/// The parts of LibTorch's state of one parameter. The optimizer's class decides which there are,
/// so they are the same for all its parameters.
struct StateParts {
  std::vector<at::Tensor*> tensors;  // of the parameter's shape, or undefined
  int64_t* step = nullptr;           // null where the class counts no steps
  double* scalar = nullptr;          // >= 0; null where the class has none
};

struct PartCollector {
  StateParts parts;

  void step(const char* /*name*/, int64_t& value) { parts.step = &value; }
  void scalar(const char* /*name*/, double& value) { parts.scalar = &value; }
  void tensor(const char* /*name*/, at::Tensor& value, bool /*is_required*/) {
    parts.tensors.push_back(&value);
  }
};

StateParts state_parts(torch::optim::OptimizerParamState& state) {
  PartCollector fields;
  const bool is_known = with_kind(state, [&](auto kind, auto& own) {
    using Kind = decltype(kind);
    if constexpr (Kind::kStepsEachParameter)
      visit_state(fields, own, typename Kind::Options(/*lr=*/1));
  });
  TORCH_INTERNAL_ASSERT(is_known);
  return std::move(fields.parts);
}

/// By tensor of a state: whether a step needs it.
struct NeedCollector {
  std::vector<char> is_needed;

  void step(const char* /*name*/, int64_t& /*value*/) {}
  void scalar(const char* /*name*/, double& /*value*/) {}
  void tensor(const char* /*name*/, at::Tensor& /*value*/, bool is_required) {
    is_needed.push_back(is_required ? 1 : 0);
  }
};

// Columns of the state table. The columns after them say which tensors a parameter's state has.
constexpr int64_t kHasState = 0;
constexpr int64_t kStep = 1;
constexpr int64_t kScalar = 2;  // its bits, whose order is that of numbers >= 0
constexpr int64_t kTensors = 3;

std::unordered_map<const void*, int64_t> numbers_in(const ShardedOptimizer::Groups& groups) {
  std::unordered_map<const void*, int64_t> numbers;
  for (const auto& group : groups) {
    for (const auto& parameter : group.params()) {
      numbers.emplace(parameter.unsafeGetTensorImpl(), static_cast<int64_t>(numbers.size()));
    }
  }
  return numbers;
}

/// A piece of a shard, as own_state() wrote it.
struct KeptPiece {
  explicit KeptPiece(const c10::IValue& written) {
    const auto& fields = written.toTupleRef().elements();
    parameter = fields[0].toInt();
    from = fields[1].toInt();
    const auto numbers = fields[2].toListRef();
    step = numbers[0].toInt();
    scalar = numbers[1].toDouble();
    for (const auto& tensor : fields[3].toListRef()) {
      tensors.push_back(tensor.isTensor() ? tensor.toTensor() : at::Tensor());
      if (tensors.back().defined()) numel = tensors.back().numel();
    }
  }

  int64_t parameter;
  int64_t from;
  int64_t step;
  double scalar;
  int64_t numel = 0;
  std::vector<at::Tensor> tensors;
};

/// Copies what two runs of elements have in common.
void copy_common(
    at::Tensor& to, int64_t to_from, int64_t to_numel, const at::Tensor& source,
    int64_t source_from) {
  const auto begin = std::max(to_from, source_from);
  const auto end = std::min(to_from + to_numel, source_from + source.numel());
  if (begin >= end) return;
  if (!to.defined()) to = at::zeros({to_numel}, source.options());
  to.narrow(0, begin - to_from, end - begin)
      .copy_(source.narrow(0, begin - source_from, end - begin));
}

}  // namespace

torch::optim::OptimizerParamState* ShardedOptimizer::state_of(const at::Tensor& value) const {
  const auto found = optimizer_->state().find(value.unsafeGetTensorImpl());
  return found == optimizer_->state().end() ? nullptr : found->second.get();
}

std::vector<char> ShardedOptimizer::needed_tensors(
    const torch::optim::OptimizerOptions& options) const {
  NeedCollector fields;
  const auto state = kind_.make_state();
  with_kind(*state, [&](auto kind, auto& own) {
    using Kind = decltype(kind);
    if constexpr (Kind::kStepsEachParameter) {
      visit_state(fields, own, static_cast<const typename Kind::Options&>(options));
    }
  });
  return std::move(fields.is_needed);
}

void ShardedOptimizer::keep_state(
    const PieceOfChunk& piece, torch::optim::OptimizerParamState& state) {
  if (!staging_) return;
  const auto parts = state_parts(state);
  for (size_t t = 0; t < parts.tensors.size(); ++t) {
    auto& tensor = *parts.tensors[t];
    if (!tensor.defined()) continue;
    if (is_staged(*piece.chunk) && !tensor.is_cpu()) tensor = tensor.cpu();
    if (file_) file_->keep(piece.value().unsafeGetTensorImpl(), t, tensor);
  }
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
      if (parts.scalar) cells[row][kScalar] = c10::bit_cast<int64_t>(*parts.scalar);
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
      const auto parts = state_parts(*state);
      if (parts.step) *parts.step = cells[first + slot][kStep];
      if (parts.scalar) *parts.scalar = c10::bit_cast<double>(cells[first + slot][kScalar]);
    }
    for (size_t t = 0; t < tensors; ++t) {
      const auto column = kTensors + static_cast<int64_t>(t);
      if (table.narrow(0, first, count).select(1, column).sum().item<int64_t>() == 0) continue;
      const auto all = gather_state(chunk, t);
      if (!whole) continue;
      for (int64_t slot = 0; slot < count; ++slot) {
        if (!cells[first + slot][column]) continue;
        const auto i = static_cast<size_t>(slot);
        const auto& p = chunk.flat.parameters()[i];
        const auto own = alias(all, chunk.flat.layout().offsets[i], p.sizes(), gradient_strides(p));
        *state_parts(*states[i]).tensors[t] = is_staged(chunk) ? own.cpu() : own.clone();
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

// Checks all parameters first: if a tensor does not fit, the old state stays, on every rank.
void ShardedOptimizer::load_state(const torch::optim::Optimizer& whole) {
  const at::NoGradGuard no_grad;
  const auto state_in_whole = [&](const at::Tensor& parameter) {
    const auto found = whole.state().find(parameter.unsafeGetTensorImpl());
    return found == whole.state().end() ? nullptr : found->second.get();
  };
  for (const auto& chunk : chunks_) {
    for (const auto& parameter : chunk.flat.parameters()) {
      auto* state = state_in_whole(parameter);
      if (!state) continue;
      for (const auto* tensor : state_parts(*state).tensors) {
        DDP_CHECK_VALUE(
            !tensor->defined() || tensor->sizes() == parameter.sizes(),
            "ZeroRedundancyOptimizer: expected a state of the parameter's shape ",
            parameter.sizes(), ", got ", tensor->sizes(),
            ". Load the state of the same model's optimizer.");
      }
    }
  }
  auto& current = optimizer_->state();
  std::decay_t<decltype(current)> taken;
  for (const auto& piece : all_pieces()) {
    const auto& parameter = piece.chunk->flat.parameters()[piece.piece().slot];
    const auto* of_parameter = state_in_whole(parameter);
    if (!of_parameter) continue;
    auto state = of_parameter->clone();
    for (auto* tensor : state_parts(*state).tensors) {
      if (!tensor->defined()) continue;
      *tensor = memory_order_of(*tensor, parameter)
                    .narrow(0, piece.piece().from, piece.piece().numel)
                    .clone();
    }
    auto& place = taken[piece.value().unsafeGetTensorImpl()];
    place = std::move(state);
    keep_loaded(piece, *place);
  }
  current = std::move(taken);
  reset_step_counts(*optimizer_);
}

void ShardedOptimizer::keep_loaded(
    const PieceOfChunk& piece, torch::optim::OptimizerParamState& state) {
  keep_state(piece, state);
  const auto* key = piece.value().unsafeGetTensorImpl();
  if (file_) file_->write(key, key);
}

c10::IValue ShardedOptimizer::own_state(const Groups& groups) const {
  sync_step_counts(*optimizer_);
  const auto numbers = numbers_in(groups);
  c10::impl::GenericList all(c10::AnyType::get());
  for (const auto& chunk : chunks_) {
    for (size_t i = 0; i < chunk.pieces.size(); ++i) {
      auto* state = state_of(chunk.values[i]);
      if (!state) continue;
      const auto& piece = chunk.pieces[i];
      const auto parts = state_parts(*state);
      c10::impl::GenericList tensors(c10::AnyType::get());
      for (const auto* tensor : parts.tensors) {
        tensors.push_back(tensor->defined() ? c10::IValue(*tensor) : c10::IValue());
      }
      c10::impl::GenericList numbers_of_state(c10::AnyType::get());
      numbers_of_state.push_back(parts.step ? *parts.step : int64_t{0});
      numbers_of_state.push_back(parts.scalar ? *parts.scalar : 0.0);
      const auto* parameter = chunk.flat.parameters()[piece.slot].unsafeGetTensorImpl();
      all.push_back(
          c10::ivalue::Tuple::create(numbers.at(parameter), piece.from, numbers_of_state, tensors));
    }
  }
  return all;
}

void ShardedOptimizer::take_state(const Groups& groups, const c10::IValue& shard) {
  const at::NoGradGuard no_grad;
  std::unordered_map<int64_t, std::vector<KeptPiece>> kept;
  for (const auto& written : shard.toListRef()) {
    KeptPiece piece(written);
    kept[piece.parameter].push_back(std::move(piece));
  }
  const auto numbers = numbers_in(groups);
  for (auto& chunk : chunks_) {
    for (size_t i = 0; i < chunk.pieces.size(); ++i) {
      const auto& piece = chunk.pieces[i];
      const auto* parameter = chunk.flat.parameters()[piece.slot].unsafeGetTensorImpl();
      const auto found = kept.find(numbers.at(parameter));
      if (found == kept.end()) continue;
      // All ranks step a parameter or none does: any of its pieces says that there is a state.
      auto& state = optimizer_->state()[chunk.values[i].unsafeGetTensorImpl()];
      if (!state) state = kind_.make_state();
      const auto parts = state_parts(*state);
      for (const auto& source : found->second) {
        if (parts.step) *parts.step = source.step;
        if (parts.scalar) *parts.scalar = source.scalar;
        for (size_t t = 0; t < parts.tensors.size(); ++t) {
          if (!source.tensors[t].defined()) continue;
          copy_common(*parts.tensors[t], piece.from, piece.numel, source.tensors[t], source.from);
        }
      }
      keep_loaded({&chunk, i}, *state);
    }
  }
  reset_step_counts(*optimizer_);
}

}  // namespace ddp
