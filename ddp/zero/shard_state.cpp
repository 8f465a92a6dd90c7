// One rank's part of the state, and what other ranks take of it.
#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <ddp/fused_optimizer.h>

#include "zero/sharded_optimizer.h"
#include "zero/state_tensors.h"

namespace ddp {
namespace {

/// The numbers of the parameters in the optimizer's groups.
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
    step = fields[2].toInt();
    for (const auto& tensor : fields[3].toListRef()) {
      tensors.push_back(tensor.isTensor() ? tensor.toTensor() : at::Tensor());
      if (tensors.back().defined()) numel = tensors.back().numel();
    }
  }

  int64_t parameter;
  int64_t from;
  int64_t step;
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
      const auto* parameter = chunk.flat.parameters()[piece.slot].unsafeGetTensorImpl();
      all.push_back(c10::ivalue::Tuple::create(
          numbers.at(parameter), piece.from, parts.step ? *parts.step : int64_t{0}, tensors));
    }
  }
  return all;
}

void ShardedOptimizer::take_state(const Groups& groups, const c10::IValue& shard) {
  const c10::NoGradGuard no_grad;
  std::unordered_map<int64_t, std::vector<KeptPiece>> kept;
  for (const auto& written : shard.toListRef()) {
    KeptPiece piece(written);
    kept[piece.parameter].push_back(std::move(piece));
  }
  const auto numbers = numbers_in(groups);
  for (const auto& chunk : chunks_) {
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
        for (size_t t = 0; t < parts.tensors.size(); ++t) {
          if (!source.tensors[t].defined()) continue;
          copy_common(*parts.tensors[t], piece.from, piece.numel, source.tensors[t], source.from);
        }
      }
    }
  }
  reset_step_counts(*optimizer_);
}

}  // namespace ddp
