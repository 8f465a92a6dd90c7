#include "sharded/flat_segment.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/functional.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Storage.h>
#include <ddp/collectives.h>
#include <ddp/internal/check.h>
#include <ddp/internal/current_stream.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/parameter_memory.h>
#include <ddp/internal/side_stream.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "sharded/block_pool.h"

namespace ddp {
namespace {

std::vector<int64_t> numels_of(const std::vector<at::Tensor>& tensors) {
  return c10::fmap(tensors, [](const auto& tensor) { return tensor.numel(); });
}

/// 1-D, with a storage of its bytes that has no memory yet.
at::Tensor without_memory(int64_t numel, const at::TensorOptions& options) {
  auto tensor = at::empty({0}, options);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(numel) * tensor.element_size(),
      c10::DataPtr(nullptr, tensor.device()), tensor.storage().allocator(), /*resizable=*/true);
  return tensor.set_(c10::Storage(std::move(storage)), 0, {numel});
}

at::TensorOptions options_of(const at::Tensor& tensor, at::ScalarType dtype) {
  return at::dtype(dtype).device(tensor.device());
}

}  // namespace

FlatSegment::FlatSegment(ProcessGroup group, std::vector<at::Tensor> parameters, const Form& form)
    : group_(std::move(group)),
      parameters_(std::move(parameters)),
      layout_(numels_of(parameters_), group_->getSize(), form.is_quantized ? kGatherBlock : 4),
      ranges_(parameters_.size()),
      accumulators_(parameters_.size()),
      shard_nodes_(parameters_.size()),
      kept_(parameters_.size()) {
  const c10::NoGradGuard no_grad;
  const auto& first = parameters_.front();
  for (const auto& piece : layout_.pieces(group_->getRank())) {
    ranges_[piece.slot] = {piece.from, piece.at, piece.numel};
  }
  if (form.is_quantized) quantized_.emplace(group_, layout_.shard_numel);
  shard_ =
      form.rests_on_host && !first.is_cpu()
          ? pinned_memory(layout_.shard_numel, first.scalar_type())
          : reducible_memory(*group_, layout_.shard_numel, options_of(first, first.scalar_type()));
  shard_.zero_();
  whole_ = without_memory(layout_.numel(), options_of(first, form.gathered));
  for (size_t slot = 0; slot < parameters_.size(); ++slot) {
    const auto& parameter = parameters_[slot];
    const auto& range = ranges_[slot];
    views_.push_back(alias(
        whole_, layout_.offsets[slot], parameter.sizes(),
        c10::contiguous_strides(parameter.sizes())));
    if (range.numel > 0) {
      const auto values = parameter.detach().reshape({-1}).narrow(0, range.from, range.numel);
      shard_.narrow(0, range.at, range.numel).copy_(values);
    }
    point(slot, views_[slot], {});
    (void)accumulator(slot);
    point(slot, piece(slot, shard_), {});
  }
  release();
}

std::vector<int64_t> FlatSegment::piece_sizes(size_t slot) const {
  std::vector<int64_t> sizes(std::max<size_t>(sizes_of(slot).size(), 1), 1);
  sizes.back() = ranges_[slot].numel;
  return sizes;
}

at::Tensor FlatSegment::piece(size_t slot, const at::Tensor& flat, int64_t begin) const {
  const auto sizes = piece_sizes(slot);
  const auto offset = flat.storage_offset() + begin + ranges_[slot].at;
  return alias(flat, offset, sizes, c10::contiguous_strides(sizes));
}

const NodePtr& FlatSegment::accumulator(size_t slot) {
  const auto& parameter = parameters_[slot];
  auto& kept = accumulators_[slot];
  if (!kept && parameter.requires_grad()) {
    namespace impl = torch::autograd::impl;
    impl::set_grad_accumulator(parameter, WeakNodePtr(NodePtr()));  // of the sizes before
    kept = impl::grad_accumulator(parameter);
  }
  return kept;
}

void FlatSegment::set_shard_node(size_t slot, NodePtr node) {
  node->add_input_metadata(piece(slot, shard_));
  shard_nodes_[slot] = std::move(node);
  const bool is_whole = parameters_[slot].is_alias_of(whole_);
  if (!is_whole) point(slot, piece(slot, shard_), shard_nodes_[slot]);
}

bool FlatSegment::is_shard_used(size_t slot) const { return shard_nodes_[slot].use_count() > 1; }

void FlatSegment::point(size_t slot, const at::Tensor& data, const NodePtr& node) {
  auto& parameter = parameters_[slot];
  parameter.set_data(data);
  if (node) torch::autograd::impl::set_grad_accumulator(parameter, WeakNodePtr(node));
}

void FlatSegment::refill() {
  refill_memory(whole_, empty_block(layout_.numel(), whole_.options(), OnFree::kReuse));
}

void FlatSegment::begin_gather(bool exactly) {
  const c10::NoGradGuard no_grad;
  exactly |= !quantized_;
  if (exactly) refill();  // else when the bytes are there
  if (exactly && group_->getSize() > 1 && shard_.scalar_type() != whole_.scalar_type()) {
    sent_ = reducible_memory(*group_, layout_.shard_numel, whole_.options());
  }
  rests_on_host() ? begin_upload(exactly) : gather_from(shard_, exactly);
}

// Memory of exact gathers comes from the stream that computes. The copy and the gather begin after
// what that has to do now, beside what it gets next, and it waits for both before the memory is
// freed.
void FlatSegment::begin_upload(bool exactly) {
  risen_ = at::empty({layout_.shard_numel}, options_of(whole_, dtype()));
  const SideStreamGuard guard(device(), SideStream::Uploads);
  risen_.copy_(shard_, /*non_blocking=*/true);
  gather_from(risen_, exactly);
  uploaded_.record(device());
}

void FlatSegment::gather_from(const at::Tensor& shard, bool exactly) {
  if (!exactly) {
    quantized_->begin(shard);
    return;
  }
  if (group_->getSize() == 1) {
    whole_.copy_(shard);
    return;
  }
  if (sent_.defined()) {
    sent_.copy_(shard);
  } else {
    sent_ = shard;
  }
  gather_ = all_gather_into_tensor_async(whole_, sent_, group_);
}

int64_t FlatSegment::gather_bytes() const {
  if (is_rounded()) return quantized_->bytes();
  return layout_.numel() * static_cast<int64_t>(element_size());
}

void FlatSegment::end_gather() {
  if (gather_) std::exchange(gather_, nullptr)->wait();
  uploaded_.block(device());
  if (quantized_ && quantized_->is_on_its_way()) {
    const c10::NoGradGuard no_grad;
    refill();
    quantized_->end(whole_);
  }
  record_use(risen_);
  if (rests_on_host()) record_use(sent_);
  risen_.reset();
  sent_.reset();
}

bool FlatSegment::is_in_place(size_t slot) const {
  const auto& parameter = parameters_[slot];
  return parameter.device() == shard_device() || parameter.is_alias_of(whole_);
}

void FlatSegment::release() {
  release_memory(whole_);
  if (quantized_) quantized_->forget();
}

void FlatSegment::part_with_whole() {
  const c10::InferenceMode no_inference(false);
  const c10::NoGradGuard no_grad;
  const auto next = without_memory(layout_.numel(), whole_.options());
  for (size_t slot = 0; slot < views_.size(); ++slot) {
    auto& view = views_[slot];
    view = alias(next, layout_.offsets[slot], view.sizes(), view.strides());
  }
  whole_ = next;
  release();
}

void FlatSegment::point_at_whole() {
  for (size_t slot = 0; slot < parameters_.size(); ++slot) {
    kept_[slot] = parameters_[slot]._version();
    point(slot, views_[slot], accumulators_[slot]);
  }
}

void FlatSegment::point_at_shard() {
  // Also where forward runs in inference mode: the parameters outlive it.
  const c10::InferenceMode no_inference(false);
  const c10::NoGradGuard no_grad;
  for (size_t slot = 0; slot < parameters_.size(); ++slot) {
    point(slot, piece(slot, shard_), shard_nodes_[slot]);
  }
}

bool FlatSegment::is_written() const {
  for (size_t slot = 0; slot < parameters_.size(); ++slot) {
    if (parameters_[slot]._version() != kept_[slot]) return true;
    if (!parameters_[slot].is_alias_of(whole_)) return true;  // set_data()
  }
  return false;
}

uint64_t FlatSegment::hash_of_whole() const {
  return whole_.is_cpu() ? hash_of_bytes(whole_.const_data_ptr(), whole_.nbytes()) : 0;
}

void FlatSegment::write_back() {
  const c10::NoGradGuard no_grad;
  const auto mine = whole_.narrow(0, group_->getRank() * layout_.shard_numel, layout_.shard_numel);
  if (mine.scalar_type() == shard_.scalar_type() && !is_rounded()) {
    shard_.copy_(mine);
  } else {
    // Unwritten elements keep the shard's full precision.
    const auto shard = shard_.to(device());
    const auto before =
        is_rounded() ? quantized_->own_values(mine.scalar_type()) : shard.to(mine.scalar_type());
    // A block with a NaN or an infinity is NaN as a whole.
    const auto are_nan = mine.isnan().logical_and_(before.isnan());
    const auto changed = mine.ne(before).logical_and_(are_nan.logical_not());
    shard_.copy_(at::where(changed, mine.to(shard_.scalar_type()), shard));
  }
  for (size_t slot = 0; slot < parameters_.size(); ++slot) {
    kept_[slot] = parameters_[slot]._version();
    const auto value = parameters_[slot].detach();
    if (value.is_alias_of(whole_)) continue;
    // set_data() gave it memory of its own, as torch::load() does.
    DDP_CHECK(
        value.sizes() == sizes_of(slot), "FullyShardedDataParallel: expected a parameter of sizes ",
        sizes_of(slot), ", got one of ", value.sizes(), " ", on_rank_text(*group_),
        ". Load a file of the same model.");
    const auto& range = ranges_[slot];
    if (range.numel > 0) {
      shard_.narrow(0, range.at, range.numel)
          .copy_(value.reshape({-1}).narrow(0, range.from, range.numel));
    }
    views_[slot].copy_(value);
    point(slot, views_[slot], accumulators_[slot]);
  }
}

}  // namespace ddp
