#include "replicas.h"

#include <ATen/ATen.h>
#include <ddp/collectives.h>

namespace examples {
namespace {

// As bytes: NaN equals itself then, and 0 differs from -0.
at::Tensor as_bytes(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> bytes;
  bytes.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    bytes.push_back(tensor.detach().contiguous().flatten().view(at::kByte));
  }
  return at::cat(bytes);
}

}  // namespace

std::vector<int64_t> ranks_unlike_first(
    const std::vector<at::Tensor>& tensors, const ddp::GroupArg& group) {
  const at::Tensor own = as_bytes(tensors);
  at::Tensor first = own.clone();
  ddp::broadcast(first, /*src=*/0, group);

  at::Tensor unlike = at::zeros({ddp::get_world_size(group)}, own.options().dtype(at::kLong));
  unlike[ddp::get_rank(group)] = at::equal(own, first) ? 0 : 1;
  ddp::all_reduce(unlike, c10d::ReduceOp::SUM, group);
  const at::Tensor ranks = unlike.nonzero().flatten().cpu();
  const int64_t* data = ranks.const_data_ptr<int64_t>();
  return std::vector<int64_t>(data, data + ranks.numel());
}

}  // namespace examples
