#include "sharded/unit_gradients.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>
#include <ddp/collectives.h>
#include <ddp/internal/capabilities.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/side_stream.h>
#include <ddp/internal/tensor_memory.h>

#include "sharded/block_pool.h"

namespace ddp {
namespace {

/// The least power of two that is at least the root of the number of summands: half of the
/// division, so that sums of float16 neither overflow nor vanish.
double divided_before(at::ScalarType dtype, int64_t ranks) {
  if (dtype != at::kHalf) return 1;
  double divisor = 1;
  while (divisor * divisor < static_cast<double>(ranks)) divisor *= 2;
  return divisor;
}

}  // namespace

int64_t UnitGradients::Groups::ranks() const {
  return int64_t{shard->getSize()} * (replicate ? replicate->getSize() : 1);
}

bool UnitGradients::Groups::wait_on_stream(c10::Device device) const {
  return !device.is_cpu() && capabilities_of(*shard, device).waits_on_stream;
}

UnitGradients::UnitGradients(std::vector<FlatSegment>& segments, at::ScalarType reduce_dtype)
    : segments_(segments), reduce_dtype_(reduce_dtype) {
  for (size_t s = 0; s < segments.size(); ++s) {
    for (size_t i = 0; i < segments[s].parameters().size(); ++i) {
      auto& slot = slots_.emplace_back();
      slot.segment = s;
      slot.slot = i;
    }
  }
}

const at::Tensor& UnitGradients::parameter_of(const Slot& slot) const {
  return segments_[slot.segment].parameters()[slot.slot];
}

const at::Tensor& UnitGradients::parameter(size_t i) const { return parameter_of(slots_[i]); }

bool UnitGradients::has_trainable() const {
  return any_of(slots_, [&](const Slot& slot) { return parameter_of(slot).requires_grad(); });
}

bool UnitGradients::has_kept() const {
  return any_of(slots_, [](const Slot& slot) { return slot.kept.defined(); });
}

bool UnitGradients::has_begun() const {
  return any_of(slots_, [](const Slot& slot) { return slot.has_begun; });
}

void UnitGradients::begin() {
  is_reduced_ = false;
  for (auto& slot : slots_) slot.has_begun = slot.has_arrived = false;
}

UnitGradients::Since UnitGradients::since_kept(const Slot& slot) const {
  const auto& grad = parameter_of(slot).grad();
  if (!grad.defined()) return Since::Cleared;
  if (!grad.is_same(slot.marker) || grad._version() == slot.marker_version) return Since::Same;
  return grad.count_nonzero().item<int64_t>() == 0 ? Since::Cleared : Since::Changed;
}

bool UnitGradients::is_changed(size_t i) const {
  const auto& slot = slots_[i];
  return !slot.has_begun && slot.kept.defined() && since_kept(slot) == Since::Changed;
}

void UnitGradients::begin_slot(Slot& slot) {
  if (std::exchange(slot.has_begun, true)) return;
  if (since_kept(slot) == Since::Cleared) slot.kept.reset();
  slot.before = std::exchange(parameter_of(slot).mutable_grad(), {});
}

void UnitGradients::fold(Slot& slot) {
  auto& grad = parameter_of(slot).mutable_grad();
  if (!slot.has_begun || !grad.defined()) return;
  const c10::NoGradGuard no_grad;
  if (slot.kept.defined()) {
    slot.kept.add_(grad);
  } else {
    slot.kept = grad.to(reduce_dtype_);
  }
  grad.reset();
}

void UnitGradients::fold() {
  for (auto& slot : slots_) fold(slot);
}

void UnitGradients::before_accumulate(size_t i) { begin_slot(slots_[i]); }

void UnitGradients::after_accumulate(size_t i) { slots_[i].has_arrived = true; }

bool UnitGradients::is_complete() const {
  return all_of(slots_, [&](const Slot& slot) {
    return slot.has_arrived || !parameter_of(slot).requires_grad();
  });
}

int64_t UnitGradients::slice_numel() const {
  int64_t numel = 0;
  for (const auto& segment : segments_) numel += segment.layout().shard_numel;
  return numel;
}

int64_t UnitGradients::reduced_bytes() const {
  return packed_numel() * static_cast<int64_t>(c10::elementSize(reduce_dtype_));
}

// The parts of the ranks lie one after another, each with its shards of all segments. With one
// segment that is the order of the parameters, whose gradients are then in one piece.
void UnitGradients::find_pieces() {
  int64_t begin = 0;
  for (int rank = 0; rank < segments_.front().layout().ranks; ++rank) {
    size_t first = 0;
    for (const auto& segment : segments_) {
      const auto& layout = segment.layout();
      int64_t filled = 0;
      for (const auto& part : layout.pieces(rank)) {
        const Piece piece{first + part.slot, part.from, begin + part.at, part.numel};
        filled = part.at + part.numel;
        const bool continues = !pieces_.empty() && pieces_.back().slot == piece.slot &&
                               pieces_.back().from + pieces_.back().numel == piece.from &&
                               pieces_.back().at + pieces_.back().numel == piece.at;
        continues ? void(pieces_.back().numel += piece.numel) : pieces_.push_back(piece);
      }
      if (filled < layout.shard_numel) {
        padding_.push_back({begin + filled, layout.shard_numel - filled});
      }
      begin += layout.shard_numel;
      first += segment.parameters().size();
    }
  }
}

void UnitGradients::pack(at::Tensor& packed) {
  if (pieces_.empty()) find_pieces();
  std::vector<at::Tensor> gradients, kept;
  const auto flat = [](const at::Tensor& t) { return t.defined() ? t.reshape({-1}) : t; };
  notes_ = {{}, scaled_.factor(), std::exchange(written_, 0)};
  for (auto& slot : slots_) {
    begin_slot(slot);
    auto& grad = parameter_of(slot).mutable_grad();
    // The accumulated ones alone take the place of new ones.
    gradients.push_back(flat(grad.defined() ? grad : slot.kept));
    kept.push_back(grad.defined() ? flat(slot.kept) : at::Tensor());
    notes_.has_gradient.push_back(gradients.back().defined());
    grad.reset();
    slot.kept.reset();
    slot.marker.reset();
  }
  std::vector<at::Tensor> places, values, sums, addends, zeros;
  for (const auto& piece : pieces_) {
    const auto place = packed.narrow(0, piece.at, piece.numel);
    const auto part = [&](const at::Tensor& t) { return t.narrow(0, piece.from, piece.numel); };
    if (!gradients[piece.slot].defined()) {
      zeros.push_back(place);
      continue;
    }
    places.push_back(place);
    values.push_back(part(gradients[piece.slot]));
    if (!kept[piece.slot].defined()) continue;
    sums.push_back(place);
    addends.push_back(part(kept[piece.slot]));
  }
  for (const auto& range : padding_) zeros.push_back(packed.narrow(0, range.at, range.numel));
  if (!places.empty()) at::_foreach_copy_(places, values);
  if (!sums.empty()) at::_foreach_add_(sums, addends);
  if (!zeros.empty()) at::_foreach_zero_(zeros);
}

std::vector<size_t> UnitGradients::gradient_bytes() const {
  std::vector<size_t> bytes;
  for (const auto& slot : slots_) {
    if (!parameter_of(slot).requires_grad()) continue;
    const auto& segment = segments_[slot.segment];
    const auto numel = c10::multiply_integers(segment.sizes_of(slot.slot));
    bytes.push_back(static_cast<size_t>(numel) * segment.element_size());
  }
  return bytes;
}

at::TensorOptions UnitGradients::packed_options() const {
  return at::dtype(reduce_dtype_).device(segments_.front().device());
}

void UnitGradients::reduce(const Groups& groups, at::Tensor packed) {
  const c10::NoGradGuard no_grad;
  is_reduced_ = true;
  {
    const MemoryScope of_gradients(MemoryKind::Gradients);
    sum_ = empty_block(slice_numel(), packed_options(), OnFree::kReturn);
  }
  const auto ranks = groups.shard->getSize();
  auto& target = ranks == 1 ? sum_ : packed;
  pack(target);
  const auto divisor = divided_before(reduce_dtype_, groups.ranks());
  if (divisor != 1) target.div_(divisor);
  summing_ = Sum::OverShards;
  if (ranks > 1) {
    packed_ = std::move(packed);
    reduction_ = reduce_scatter_tensor_async(sum_, packed_, c10d::ReduceOp::SUM, groups.shard);
  }
  // The stream that computes waits for no sum before the end of the pass.
  if (groups.wait_on_stream(sum_.device())) {
    const SideStreamGuard guard(sum_.device(), SideStream::Sums);
    sum_replicas(groups);
    if (segments_.front().rests_on_host()) end_sum(groups);
  }
}

void UnitGradients::sum_replicas(const Groups& groups) {
  summing_ = Sum::OverReplicas;
  if (reduction_) reduction_->wait();
  if (!groups.replicate || groups.replicate->getSize() == 1) return;
  replica_sum_ = all_reduce_async(sum_, c10d::ReduceOp::SUM, groups.replicate);
}

void UnitGradients::end_sum(const Groups& groups) {
  summing_ = Sum::Ended;
  if (replica_sum_) std::exchange(replica_sum_, nullptr)->wait();
  const auto divisor =
      static_cast<double>(groups.ranks()) / divided_before(reduce_dtype_, groups.ranks());
  if (divisor != 1) sum_.div_(divisor);
  if (segments_.front().rests_on_host()) sum_ = copy_down(sum_, copied_);
}

void UnitGradients::finish_packed(const Groups& groups) {
  const c10::NoGradGuard no_grad;
  if (summing_ == Sum::OverShards) sum_replicas(groups);
  if (reduction_) std::exchange(reduction_, nullptr)->wait();
  packed_.reset();
}

void UnitGradients::finish_reduction(const Groups& groups) {
  if (!sum_.defined()) return;
  const c10::NoGradGuard no_grad;
  finish_packed(groups);
  if (summing_ != Sum::Ended) end_sum(groups);
}

void UnitGradients::note_writes(uint64_t hash) {
  written_ = std::max<uint64_t>(1, mixed(written_, hash));
}

void UnitGradients::add_to_shards(const std::vector<bool>& has_gradient) {
  if (!sum_.defined()) return;
  const c10::NoGradGuard no_grad;
  copied_.await();
  scaled_.clear();
  int64_t begin = 0;
  size_t i = 0;
  for (const auto& segment : segments_) {
    for (size_t s = 0; s < segment.parameters().size(); ++s, ++i) {
      auto& grad = segment.parameters()[s].mutable_grad();
      grad = std::exchange(slots_[i].before, {});
      if (!has_gradient[i]) continue;
      auto part = segment.piece(s, sum_, begin);
      if (grad.defined()) {
        grad.add_(part);
      } else {
        // A sample keeps the memory of its own gradient alone.
        grad = part.to(segment.dtype(), /*non_blocking=*/false, /*copy=*/scaled_.takes(part));
      }
      scaled_.sample(grad);
    }
    begin += segment.layout().shard_numel;
  }
  sum_.reset();
}

void UnitGradients::keep_whole() {
  for (auto& slot : slots_) {
    if (!slot.has_begun) continue;
    fold(slot);
    auto& grad = parameter_of(slot).mutable_grad();
    grad = std::exchange(slot.before, {});
    if (!slot.kept.defined()) continue;
    if (!grad.defined()) {
      const auto& segment = segments_[slot.segment];
      const auto options = at::dtype(segment.dtype()).device(segment.shard_device());
      grad = at::zeros(segment.piece_sizes(slot.slot), options);
    }
    slot.marker = grad;
    slot.marker_version = grad._version();
  }
}

void UnitGradients::restore() {
  reduction_.reset();
  replica_sum_.reset();
  for (auto& slot : slots_) {
    if (!std::exchange(slot.has_begun, false)) continue;
    parameter_of(slot).mutable_grad() = std::exchange(slot.before, {});
  }
  packed_.reset();
  sum_.reset();
}

}  // namespace ddp
