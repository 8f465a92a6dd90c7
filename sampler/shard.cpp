#include "shard.h"

#include <algorithm>

namespace ddp {

int64_t sample_count(const ShardSpec& spec) {
  const int64_t rest = std::max<int64_t>(spec.order_size - spec.offset, 0);
  switch (spec.tail) {
    case Tail::kRepeat:
      return (rest + spec.num_replicas - 1) / spec.num_replicas;
    case Tail::kDrop:
      return rest / (spec.num_replicas * spec.batch_size) * spec.batch_size;
    case Tail::kUneven:
      return (std::max<int64_t>(rest - spec.rank, 0) + spec.num_replicas - 1) / spec.num_replicas;
  }
  return 0;
}

std::vector<size_t> take_shard(const at::Tensor& order, const ShardSpec& spec) {
  std::vector<size_t> indices(static_cast<size_t>(sample_count(spec)));
  const int64_t* samples = order.defined() ? order.const_data_ptr<int64_t>() : nullptr;
  int64_t position = spec.offset + spec.rank;
  for (auto& index : indices) {
    const int64_t wrapped = position % spec.order_size;
    index = static_cast<size_t>(samples != nullptr ? samples[wrapped] : wrapped);
    position += spec.num_replicas;
  }
  return indices;
}

}  // namespace ddp
