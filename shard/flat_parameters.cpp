#include <ddp/internal/flat_parameters.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/core/functional.h>
#include <ATen/core/grad_mode.h>
#include <ddp/collectives.h>
#include <ddp/internal/parameter_memory.h>

namespace ddp {
namespace {

std::vector<int64_t> numels_of(const std::vector<at::Tensor>& tensors) {
  return c10::fmap(tensors, [](const auto& tensor) { return tensor.numel(); });
}

int64_t round_up(int64_t numel, int64_t multiple) {
  return (numel + multiple - 1) / multiple * multiple;
}

constexpr int64_t kMultiple = 4;  // elements of a shard are a multiple of it

}  // namespace

FlatLayout::FlatLayout(const std::vector<int64_t>& numels_, int ranks_, int64_t multiple)
    : numels(numels_), ranks(ranks_) {
  int64_t end = 0;
  for (const auto numel : numels) {
    offsets.push_back(end);
    end += numel;
  }
  shard_numel = round_up(end, multiple * int64_t{ranks}) / ranks;
}

// Largest tensors first, each to the rank that has least: at most 4/3 of the best possible.
FlatLayout FlatLayout::of_whole_tensors(
    const std::vector<int64_t>& numels, std::vector<int64_t>& loads) {
  FlatLayout layout(numels, static_cast<int>(loads.size()), kMultiple);
  std::vector<size_t> by_size(numels.size());
  std::iota(by_size.begin(), by_size.end(), size_t{0});
  std::stable_sort(
      by_size.begin(), by_size.end(), [&](auto a, auto b) { return numels[a] > numels[b]; });
  std::vector<int64_t> filled(loads.size());
  std::vector<size_t> rank_of(numels.size());
  for (const auto slot : by_size) {
    size_t least = 0;
    for (size_t rank = 1; rank < loads.size(); ++rank) {
      if (std::pair(filled[rank], loads[rank]) < std::pair(filled[least], loads[least])) {
        least = rank;
      }
    }
    rank_of[slot] = least;
    layout.offsets[slot] = filled[least];
    filled[least] += numels[slot];
    loads[least] += numels[slot];
  }
  layout.shard_numel = round_up(*std::max_element(filled.begin(), filled.end()), kMultiple);
  for (size_t slot = 0; slot < numels.size(); ++slot) {
    layout.offsets[slot] += static_cast<int64_t>(rank_of[slot]) * layout.shard_numel;
  }
  return layout;
}

int64_t FlatLayout::padding() const {
  return numel() - std::accumulate(numels.begin(), numels.end(), int64_t{0});
}

std::vector<ShardPiece> FlatLayout::pieces(int rank) const {
  const int64_t begin = shard_numel * rank;
  const int64_t end = begin + shard_numel;
  std::vector<ShardPiece> pieces;
  for (size_t slot = 0; slot < numels.size(); ++slot) {
    const auto first = std::max(offsets[slot], begin);
    const auto last = std::min(offsets[slot] + numels[slot], end);
    if (first < last) pieces.push_back({slot, first - offsets[slot], first - begin, last - first});
  }
  return pieces;
}

FlatParameters::FlatParameters(ProcessGroup group, std::vector<at::Tensor> parameters)
    : FlatParameters(
          group, parameters, FlatLayout(numels_of(parameters), group->getSize(), kMultiple)) {}

FlatParameters::FlatParameters(
    ProcessGroup group, std::vector<at::Tensor> parameters, std::vector<int64_t>& loads)
    : FlatParameters(
          group, parameters, FlatLayout::of_whole_tensors(numels_of(parameters), loads)) {}

FlatParameters::FlatParameters(
    ProcessGroup group, std::vector<at::Tensor> parameters, FlatLayout layout)
    : group_(std::move(group)), parameters_(std::move(parameters)), layout_(std::move(layout)) {
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
