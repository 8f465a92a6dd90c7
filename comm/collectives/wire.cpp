#include "collectives/wire.h"

#include <algorithm>

#include <ddp/internal/as_real.h>
#include <ddp/internal/capabilities.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

#include "collectives/collective_checks.h"

namespace ddp {
namespace {

using c10d::ReduceOp;

// Whether both Gloo and NCCL support the dtype.
bool is_sent_as_is(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return true;
    default:
      return false;
  }
}

// Also writes the values to memory, because conj() and imag() may be lazy.
at::Tensor contiguous(const at::Tensor& tensor) {
  // The usual tensor goes as it is: the calls below take a tenth of a small collective's time.
  const bool is_lazy = tensor.is_conj() || tensor.is_neg();
  if (!tensor.requires_grad() && !is_lazy && tensor.is_contiguous()) return tensor;
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

// Returns the bytes of a contiguous tensor, sharing its memory.
at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.reshape({-1}).view(at::kByte); }

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

void Wire::copy_back() const {
  if (!is_copy()) return;
  auto to = tensor.detach();
  auto from = wire;
  if (from.scalar_type() != to.scalar_type()) from = from.reshape({-1}).view(to.scalar_type());
  to.copy_(from.view(to.sizes()));
}

Wire wire_of(const at::Tensor& tensor) {
  const auto plain = contiguous(tensor);
  return {tensor, is_sent_as_is(plain.scalar_type()) ? plain : as_bytes(plain)};
}

Wire message_wire_of(const at::Tensor& tensor, c10d::ProcessGroup& group) {
  const bool takes_all = capabilities_of(group, tensor.device()).falls_back_to_gloo;
  return takes_all ? Wire{tensor, contiguous(tensor)} : wire_of(tensor);
}

std::vector<Wire> wires_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Wire> wires;
  for (const auto& tensor : tensors) wires.push_back(wire_of(tensor));
  return wires;
}

std::vector<at::Tensor> wire_tensors(const std::vector<Wire>& wires) {
  std::vector<at::Tensor> tensors;
  for (const auto& wire : wires) tensors.push_back(wire.wire);
  return tensors;
}

std::vector<at::Tensor> caller_tensors(const std::vector<Wire>& wires) {
  std::vector<at::Tensor> tensors;
  for (const auto& wire : wires) tensors.push_back(wire.tensor);
  return tensors;
}

Wire reduction_wire_of(const at::Tensor& tensor, const WireReduction& reduction) {
  const auto plain = contiguous(tensor);
  if (plain.is_complex()) return {tensor, as_real(plain)};
  if (plain.scalar_type() == reduction.dtype) return {tensor, plain};
  return {tensor, plain.view(reduction.dtype)};
}

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

WorkPtr combine_and_copy_out(std::vector<WorkPtr> works, std::vector<Wire> outputs, int divisor) {
  const bool none_copied = std::none_of(
      outputs.begin(), outputs.end(), [](const Wire& output) { return output.is_copy(); });
  if (works.size() == 1 && none_copied && divisor == 1) return works.front();
  const auto tensors = caller_tensors(outputs);
  const auto finish = [outputs = std::move(outputs), divisor] {
    for (const auto& output : outputs) {
      if (divisor != 1) at::Tensor(output.wire).div_(divisor);
      output.copy_back();
    }
  };
  return c10::make_intrusive<CompositeWork>(std::move(works), finish, tensors);
}

}  // namespace ddp
