#include "ordered_reduction.h"

#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ddp/internal/c10d_names.h>

#include "../memory/tensors.h"
#include "reduce.h"

namespace ddp::backends::shm {
namespace {

// Gloo's minimum or maximum of a number and a NaN is either, depending on their order.
bool may_lose_nan(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  return tensor.is_floating_point() && (op == c10d::ReduceOp::MIN || op == c10d::ReduceOp::MAX);
}

}  // namespace

OrderedReduction::OrderedReduction(
    c10d::Backend& backend, const at::Tensor& tensor, const c10d::AllreduceOptions& options)
    : backend_(backend), tensor_(flat(tensor)), options_(options) {
  const int64_t ranks = backend.getSize();
  if (ranks == 2 && !may_lose_nan(tensor, options.reduceOp)) {  // a + b is b + a
    std::vector<at::Tensor> tensors{tensor_};
    work_ = backend.allreduce(tensors, options);
    return;
  }
  const int64_t part = tensor_.numel() / ranks + 1;
  all_ = at::empty({ranks * part}, tensor_.options());
  parts_ = at::empty_like(all_);
  assign(all_.narrow(0, 0, tensor_.numel()), tensor_);
  all_.narrow(0, tensor_.numel(), all_.numel() - tensor_.numel()).zero_();
  std::vector<int64_t> equal;
  c10d::AllToAllOptions to_all;
  to_all.timeout = options.timeout;
  work_ = backend.DDP_ALL_TO_ALL_SINGLE(parts_, all_, equal, equal, to_all);
}

void OrderedReduction::combine(Wait wait) {
  if (!parts_.defined()) return;
  wait(*work_);
  const int64_t part = parts_.numel() / backend_.getSize();
  std::vector<const std::byte*> sources;
  for (const auto& of_rank : parts_.split(part)) sources.push_back(bytes_of(of_rank));
  auto mine = at::empty({part}, parts_.options());
  reduce_elements(
      parts_.scalar_type(), options_.reduceOp, sources, {bytes_of(mine)}, 0,
      static_cast<size_t>(part));
  c10d::AllgatherOptions gather;
  gather.timeout = options_.timeout;
  work_ = backend_.DDP_ALL_GATHER_SINGLE(all_, mine, gather);
}

void OrderedReduction::finish(Wait wait) {
  wait(*work_);
  if (all_.defined()) assign(tensor_, all_.narrow(0, 0, tensor_.numel()));
}

}  // namespace ddp::backends::shm
