#include "collectives/reduction_check.h"

#include <ddp/internal/capabilities.h>
#include <ddp/internal/check.h>
#include <ddp/internal/rank_text.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

using c10d::ReduceOp;

[[noreturn]] void refuse_reduction(
    const char* call, const ReduceOp& op, const at::Tensor& tensor, c10d::ProcessGroup& group,
    const ReductionTable& served) {
  const auto dtype = tensor.scalar_type();
  const auto backend = group.getBackend(tensor.device().type())->getBackendName();
  auto remedy = ddp::str("Use one of ", served.ops_of(dtype), " there");
  if (served.ops_of(dtype).empty()) {
    const auto of_op = served.dtypes_of(op.op_);
    const auto dtypes = of_op.empty() ? served.dtypes_of(ReduceOp::SUM) : of_op;
    remedy = ddp::str("Convert it first, to one of ", dtypes);
  }
  DDP_CHECK_VALUE(
      false, call, ": expected a dtype and an operation that backend ", backend,
      " can reduce, got ", to_text(op.op_), " of ", dtype, " ", on_rank_text(group), ". ", remedy,
      ".");
}

}  // namespace

WireReduction wire_reduction(
    const char* call, const c10d::ReduceOp& op, const at::Tensor& tensor,
    c10d::ProcessGroup& group) {
  const auto dtype = tensor.scalar_type();
  const bool complex = at::isComplexType(dtype);
  DDP_CHECK_VALUE(
      !complex || op.op_ == ReduceOp::SUM || op.op_ == ReduceOp::AVG, call,
      ": expected SUM or AVG for complex tensors, got ", to_text(op.op_), " on ", dtype, " ",
      on_rank_text(group), ". Reduce at::view_as_real() of it where the parts are meant.");
  DDP_CHECK_VALUE(
      op.op_ != ReduceOp::AVG || complex || at::isFloatingType(dtype), call,
      ": expected a floating-point or complex tensor for AVG, got ", dtype, " ",
      on_rank_text(group), ". Use SUM and divide as you need it.");
  const auto can = capabilities_of(group, tensor.device());
  WireReduction reduction{op, reduced_as(dtype, op.op_)};
  if (op.op_ == ReduceOp::AVG && can.falls_back_to_gloo) {  // which does not support AVG
    reduction.op = ReduceOp::SUM;
    reduction.divisor = group.getSize();
  }
  if (dtype == at::kBool) {
    // On the bytes 0 and 1: "or" and "and", whose results are 0 or 1 at any world size.
    if (op.op_ == ReduceOp::SUM) reduction.op = ReduceOp::MAX;
    if (op.op_ == ReduceOp::PRODUCT) reduction.op = ReduceOp::MIN;
  }
  if (can.reductions != nullptr && !can.reductions->has(reduction.dtype, reduction.op.op_)) {
    refuse_reduction(call, op, tensor, group, *can.reductions);
  }
  return reduction;
}

}  // namespace ddp
