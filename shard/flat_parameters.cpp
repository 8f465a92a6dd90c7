#include <ddp/internal/flat_parameters.h>

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ddp/collectives.h>
#include <ddp/internal/parameter_memory.h>

namespace ddp {
namespace {

FlatLayout layout_of(const std::vector<at::Tensor>& tensors, int ranks) {
  std::vector<int64_t> numels;
  for (const auto& tensor : tensors) numels.push_back(tensor.numel());
  return {numels, ranks};
}

}  // namespace

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
  if (whole_.storage().nbytes() == 0) {
    refill_memory(whole_, reducible_memory(*group_, layout_.numel(), whole_.options()));
  }
  return all_gather_into_tensor_async(whole_, shard_, group_);
}

void FlatParameters::release() {
  if (shard_.is_alias_of(whole_)) shard_ = shard_.clone();
  release_memory(whole_);
}

}  // namespace ddp
