#include <ddp/internal/flat_parameters.h>

#include <algorithm>
#include <utility>

#include <ATen/core/functional.h>
#include <ATen/core/grad_mode.h>
#include <ddp/collectives.h>
#include <ddp/internal/parameter_memory.h>

namespace ddp {
namespace {

FlatLayout layout_of(const std::vector<at::Tensor>& tensors, int ranks) {
  return {c10::fmap(tensors, [](const auto& tensor) { return tensor.numel(); }), ranks};
}

}  // namespace

FlatLayout::FlatLayout(const std::vector<int64_t>& numels, int ranks_, int64_t multiple)
    : offsets{0}, ranks(ranks_) {
  for (const auto numel : numels) offsets.push_back(offsets.back() + numel);
  const int64_t of_all = multiple * int64_t{ranks};
  shard_numel = (offsets.back() + of_all - 1) / of_all * multiple;
}

std::vector<ShardPiece> FlatLayout::pieces(int rank) const {
  const int64_t begin = shard_numel * rank;
  const int64_t end = begin + shard_numel;
  std::vector<ShardPiece> pieces;
  for (size_t slot = 0; slot + 1 < offsets.size(); ++slot) {
    const auto first = std::max(offsets[slot], begin);
    const auto last = std::min(offsets[slot + 1], end);
    if (first < last) pieces.push_back({slot, first - offsets[slot], first - begin, last - first});
  }
  return pieces;
}

FlatParameters::FlatParameters(ProcessGroup group, std::vector<at::Tensor> parameters)
    : group_(std::move(group)),
      parameters_(std::move(parameters)),
      layout_(layout_of(parameters_, group_->getSize())) {
  const auto& first = parameters_.front();
  const auto options = at::dtype(first.scalar_type()).device(first.device());
  whole_ = reducible_memory(*group_, layout_.numel(), options).zero_();
  shard_ = whole_.narrow(0, group_->getRank() * layout_.shard_numel, layout_.shard_numel);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& p = parameters_[i];
    const auto offset = whole_.storage_offset() + layout_.offsets[i];
    views_.push_back(alias(whole_, offset, p.sizes(), gradient_strides(p)));
    move_in(i);
  }
}

void FlatParameters::move_in(size_t i) {
  const at::NoGradGuard no_grad;
  views_[i].copy_(parameters_[i]);
  parameters_[i].set_data(views_[i]);
}

c10::intrusive_ptr<c10d::Work> FlatParameters::gather_async() {
  return all_gather_into_tensor_async(whole_, shard_, group_);
}

}  // namespace ddp
