#include "shard.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randperm.h>

namespace ddp {
namespace {

// Only LibTorch's own randperm gives Python's order: its algorithm depends on n.
at::Tensor shuffled_order(const ShardSpec& spec) {
  const auto seed = static_cast<uint64_t>(spec.seed) + static_cast<uint64_t>(spec.epoch);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randperm(spec.dataset_size, generator, at::TensorOptions().dtype(at::kLong));
}

}  // namespace

int64_t shard_size(const ShardSpec& spec) {
  const int64_t whole = spec.dataset_size / spec.num_replicas;
  const bool uneven = spec.dataset_size % spec.num_replicas != 0;
  return whole + (uneven && !spec.drop_last ? 1 : 0);
}

std::vector<size_t> shard_indices(const ShardSpec& spec) {
  std::vector<size_t> indices(static_cast<size_t>(shard_size(spec)));
  if (indices.empty()) return indices;

  const at::Tensor order = spec.shuffle ? shuffled_order(spec) : at::Tensor();
  const int64_t* shuffled = order.defined() ? order.const_data_ptr<int64_t>() : nullptr;
  int64_t position = spec.rank;
  for (auto& index : indices) {
    const int64_t wrapped = position % spec.dataset_size;
    index = static_cast<size_t>(shuffled != nullptr ? shuffled[wrapped] : wrapped);
    position += spec.num_replicas;
  }
  return indices;
}

}  // namespace ddp
