#include <ddp/collectives.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "collectives/collective_checks.h"

namespace ddp {

void hierarchical_all_reduce(
    at::Tensor& tensor, const GroupArg& inner_arg, const GroupArg& outer_arg, c10d::ReduceOp op) {
  const auto inner = inner_arg.get();
  const auto outer = outer_arg.get();
  check_tensor("hierarchical_all_reduce", tensor, *inner);
  const c10::NoGradGuard no_grad;
  const int64_t ranks = inner->getSize();
  const auto numel = tensor.numel();
  const auto part_size = (numel + ranks - 1) / ranks;
  auto whole = at::zeros({part_size * ranks}, tensor.options());  // zeros pad the last part
  whole.narrow(0, 0, numel).copy_(tensor.reshape({-1}));
  auto part = at::empty({part_size}, tensor.options());
  reduce_scatter_tensor(part, whole, op, inner);
  all_reduce(part, op, outer);
  all_gather_into_tensor(whole, part, inner);
  tensor.copy_(whole.narrow(0, 0, numel).view(tensor.sizes()));
}

}  // namespace ddp
