#include "zero/sharded_optimizer.h"

#include <algorithm>
#include <numeric>
#include <unordered_set>

#include <ATen/ops/empty.h>
#include <ddp/internal/bucket_plan.h>
#include <ddp/internal/check.h>
#include <ddp/internal/parameter_memory.h>

namespace ddp {
namespace {

// A backend may need a copy of that size for a gather.
constexpr int64_t kChunkBytes = int64_t{2} << 20;
constexpr int64_t kStreamChunkBytes = int64_t{25} << 20;
constexpr int64_t kMostElements = int64_t{1} << 20;  // of a piece that is offloaded

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

// Pieces of at most so many elements: a multiple of the elements that a kernel computes together,
// so that the cut changes no bit.
std::vector<ShardPiece> cut(const std::vector<ShardPiece>& pieces, int64_t most) {
  std::vector<ShardPiece> parts;
  for (const auto& piece : pieces) {
    for (int64_t from = 0; from < piece.numel; from += most) {
      const auto numel = std::min(most, piece.numel - from);
      parts.push_back({piece.slot, piece.from + from, piece.at + from, numel});
    }
  }
  return parts;
}

// The optimizer's parameter for the last piece of a chunk. A staged one has no memory yet.
at::Tensor value_of(const ShardChunk& chunk, bool is_staged) {
  const auto& shard = chunk.flat.shard();
  if (is_staged) return at::empty({0}, at::dtype(shard.scalar_type()));
  const auto& piece = chunk.pieces.back();
  return shard.narrow(0, piece.at, piece.numel).detach();
}

}  // namespace

Chunks chunks_of_buckets(
    const std::vector<std::vector<size_t>>& buckets,
    const std::vector<NamedParameter>& parameters) {
  Chunks chunks;
  for (const auto& indices : buckets) {
    auto& chunk = chunks.emplace_back();
    for (const auto index : indices) chunk.push_back(parameters[index].tensor);
  }
  return chunks;
}

Chunks chunks_of_groups(
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    const std::vector<NamedParameter>& parameters, bool waits_on_stream, int whole_over) {
  std::unordered_set<const void*> stepped;
  for (const auto& group : groups) {
    for (const auto& p : group.params()) stepped.insert(p.unsafeGetTensorImpl());
  }
  std::vector<NamedParameter> own;
  for (const auto& p : parameters) {
    if (stepped.count(p.tensor.unsafeGetTensorImpl()) > 0) own.push_back(p);
  }
  std::vector<size_t> reversed(own.size());  // the usual order of gradients
  std::iota(reversed.rbegin(), reversed.rend(), size_t{0});
  auto bytes = waits_on_stream ? kStreamChunkBytes : kChunkBytes;
  for (const auto& p : own) {
    if (whole_over > 1)
      bytes = std::max(bytes, whole_over * static_cast<int64_t>(p.tensor.nbytes()));
  }
  return chunks_of_buckets(plan_buckets(extents_of(own), {bytes}, reversed).buckets, own);
}

std::vector<ShardPiece> joined_pieces(const ShardChunk& chunk) {
  std::vector<ShardPiece> joined;
  for (const auto& piece : chunk.pieces) {
    if (!joined.empty() && joined.back().slot == piece.slot) {
      joined.back().numel += piece.numel;
    } else {
      joined.push_back(piece);
    }
  }
  return joined;
}

std::vector<at::Tensor> gradients_of(
    const ShardChunk& chunk, const std::vector<ShardPiece>& pieces) {
  std::vector<at::Tensor> gradients;
  for (const auto& piece : pieces) {
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
    ProcessGroup group, Chunks chunks, const Groups& groups,
    const torch::optim::OptimizerOptions& defaults, detail::ZeroKind kind,
    const ZeroOptions& options)
    : group_(std::move(group)), kind_(std::move(kind)) {
  const at::NoGradGuard no_grad;
  if (is_offloaded(options)) staging_ = std::make_unique<HostStaging>();
  std::unordered_map<const void*, size_t> group_of;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const auto& p : groups[g].params()) group_of[p.unsafeGetTensorImpl()] = g;
  }
  std::vector<std::vector<at::Tensor>> values(groups.size());
  std::vector<StateFile::Entry> entries;
  std::vector<int64_t> loads(static_cast<size_t>(group_->getSize()));
  for (auto& parameters : chunks) {
    auto& chunk = chunks_.emplace_back(ShardChunk{flat_of(std::move(parameters), loads)});
    const auto& flat = chunk.flat;
    for (const auto& piece : pieces_of(flat)) {
      const auto& parameter = flat.parameters()[piece.slot];
      const auto found = group_of.find(parameter.unsafeGetTensorImpl());
      if (found == group_of.end()) continue;
      chunk.pieces.push_back(piece);
      chunk.values.push_back(value_of(chunk, is_staged(chunk)));
      values[found->second].push_back(chunk.values.back());
      if (kind_.needs_whole_tensors) {
        const auto strides = gradient_strides(parameter);
        places_[chunk.values.back().unsafeGetTensorImpl()] = {
            parameter.sizes().vec(), {strides.begin(), strides.end()}};
      }
      if (!options.offload_file()) continue;
      entries.push_back(
          {chunk.values.back().unsafeGetTensorImpl(), piece.numel, flat.whole().scalar_type(),
           needed_tensors(groups[found->second].options())});
    }
  }
  if (options.offload_file()) file_ = std::make_unique<StateFile>(*options.offload_file(), entries);
  Groups own;
  for (size_t g = 0; g < groups.size(); ++g) {
    own.emplace_back(std::move(values[g]), groups[g].options().clone());
  }
  if (staging_) {
    make_offloaded(own, defaults);
  } else {
    optimizer_ = make(own, defaults);
  }
}

FlatParameters ShardedOptimizer::flat_of(
    std::vector<at::Tensor> parameters, std::vector<int64_t>& loads) const {
  if (kind_.needs_whole_tensors) return {group_, std::move(parameters), loads};
  return {group_, std::move(parameters)};
}

std::vector<ShardPiece> ShardedOptimizer::pieces_of(const FlatParameters& flat) const {
  auto pieces = flat.layout().pieces(group_->getRank());
  return staging_ && !kind_.needs_whole_tensors ? cut(pieces, kMostElements) : pieces;
}

std::unique_ptr<torch::optim::Optimizer> ShardedOptimizer::make(
    const Groups& own, const torch::optim::OptimizerOptions& defaults) const {
  return kind_.make(own, defaults, places_);
}

double ShardedOptimizer::balance() const {
  std::vector<int64_t> of_ranks(static_cast<size_t>(group_->getSize()));
  for (const auto& chunk : chunks_) {
    for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
      for (const auto& piece : chunk.flat.layout().pieces(static_cast<int>(rank))) {
        of_ranks[rank] += piece.numel;
      }
    }
  }
  const auto most = *std::max_element(of_ranks.begin(), of_ranks.end());
  const auto all = std::accumulate(of_ranks.begin(), of_ranks.end(), int64_t{0});
  return most == 0 ? 1 : static_cast<double>(all) / static_cast<double>(most * group_->getSize());
}

void ShardedOptimizer::set_options(const Groups& groups) {
  auto& own = optimizer_->param_groups();
  for (size_t g = 0; g < own.size(); ++g) own[g].set_options(groups[g].options().clone());
}

void ShardedOptimizer::step() {
  Pieces pieces;
  for (auto& chunk : chunks_) {
    move_into_memory(chunk.flat);
    auto gradients = gradients_of(chunk, chunk.pieces);
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].defined()) pieces.push_back({&chunk, i, std::move(gradients[i])});
    }
  }
  step(std::move(pieces));
}

void ShardedOptimizer::step(ShardChunk& chunk) {
  move_into_memory(chunk.flat);
  auto gradients = gradients_of(chunk, chunk.pieces);
  Pieces pieces;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const bool is_reduced = chunk.reported[chunk.pieces[i].slot] != 0;
    if (is_reduced && gradients[i].defined()) {
      pieces.push_back({&chunk, i, std::move(gradients[i])});
    }
  }
  step(std::move(pieces));
}

// The optimizer skips values without a gradient, so this steps the pieces alone.
void ShardedOptimizer::step(Pieces pieces) {
  if (staging_) return step_by_windows(windows_of(std::move(pieces)));
  for (const auto& piece : pieces) piece.value().mutable_grad() = piece.gradient;
  optimizer_->step();
  for (const auto& piece : pieces) piece.value().mutable_grad().reset();
}

void ShardedOptimizer::mark_changed(const ShardChunk& chunk) {
  for (const auto& p : chunk.flat.parameters()) p.unsafeGetTensorImpl()->bump_version();
}

}  // namespace ddp
