#include "collectives/arguments.h"

#include <algorithm>
#include <cstdint>

#include <ATen/core/functional.h>
#include <ATen/ops/view_as_real.h>
#include <ddp/internal/capabilities.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "backends/message_check.h"
#include "group/monitored_group.h"

namespace ddp {
namespace {

using c10d::ReduceOp;

[[noreturn]] void refuse_reduction(
    const char* call, const ReduceOp& op, const at::Tensor& tensor, c10d::ProcessGroup& group,
    const ReductionTable& served) {
  const auto dtype = tensor.scalar_type();
  const auto backend = backend_name(group, tensor.device().type());
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

bool share_memory(const at::Tensor& one, const at::Tensor& other) {
  const auto begin = [](const at::Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.const_data_ptr());
  };
  return begin(one) < begin(other) + other.nbytes() && begin(other) < begin(one) + one.nbytes();
}

void check_tag(const char* call, int tag, c10d::ProcessGroup& group) {
  DDP_CHECK_VALUE(
      is_tag(tag), call, ": expected a tag of 0 to ", kMostTag, ", got ", tag, " ",
      on_rank_text(group), ". Give both sides the same one, such as 0.");
}

// A program that was ported from Python may pass ranks of the world. Where a wrong rank is one of a
// member, the text says which rank of the group that is.
std::string world_rank_hint(int rank, c10d::ProcessGroup& group) {
  const auto* own = dynamic_cast<const MonitoredGroup*>(&group);
  if (own == nullptr) return "";
  const auto& world_ranks = own->recipe().world_ranks;
  const auto member = std::find(world_ranks.begin(), world_ranks.end(), rank);
  if (member == world_ranks.end() || member - world_ranks.begin() == rank) return "";
  return ddp::str(
      " Python counts ranks in the world, where rank ", rank, " is rank ",
      member - world_ranks.begin(), " of this group.");
}

// Returns the bytes of a contiguous tensor, sharing its memory.
at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.reshape({-1}).view(at::kByte); }

std::vector<at::Tensor> caller_tensors(const std::vector<WireTensor>& wires) {
  return c10::fmap(wires, [](const auto& wire) { return wire.tensor; });
}

}  // namespace

void check_tensor(const char* call, const at::Tensor& tensor, c10d::ProcessGroup& group) {
  DDP_CHECK_VALUE(
      tensor.defined(), call, ": expected a defined tensor, got an undefined one ",
      on_rank_text(group), ". Give it a size before the call, as at::empty() does.");
  DDP_CHECK_VALUE(
      tensor.layout() == at::kStrided, call, ": expected a dense tensor, got layout ",
      tensor.layout(), " ", on_rank_text(group), ". Call to_dense() first.");
  DDP_CHECK_VALUE(
      !tensor.is_quantized(), call, ": expected a tensor of plain numbers, got a quantized one of ",
      tensor.scalar_type(), " ", on_rank_text(group),
      ". Its scale stays on this rank: call dequantize(), or send int_repr() and the scale.");
  const auto devices = group.getDeviceTypes();
  std::string served;
  for (const auto& device : devices) {
    if (device.type() == tensor.device().type()) return;
    served += (served.empty() ? "" : ", ") + device.str();
  }
  DDP_CHECK_VALUE(
      false, call, ": expected a tensor on a device the group has a backend for (", served,
      "), got one on ", tensor.device(), " ", on_rank_text(group),
      ". Move the tensor, or choose the backends, as in backend(\"cpu:gloo,cuda:nccl\").");
}

void check_list(
    const char* call, const char* name, const std::vector<at::Tensor>& tensors,
    const at::Tensor& like, c10d::ProcessGroup& group) {
  DDP_CHECK_VALUE(
      tensors.size() == static_cast<size_t>(group.getSize()), call,
      ": expected one tensor per rank in ", name, ", which is ", group.getSize(), ", got ",
      tensors.size(), " ", on_rank_text(group), ". Give one for each rank, in the order of ranks.");
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_tensor(call, tensors[i], group);
    DDP_CHECK_VALUE(
        tensors[i].scalar_type() == like.scalar_type() && tensors[i].device() == like.device(),
        call, ": expected ", name, "[", i, "] to be ", like.scalar_type(), " on ", like.device(),
        " like the rest, got ", tensors[i].scalar_type(), " on ", tensors[i].device(), " ",
        on_rank_text(group), ". Convert it with to() first.");
  }
}

void check_no_list(
    const char* call, const char* name, const std::vector<at::Tensor>& tensors, int root,
    c10d::ProcessGroup& group) {
  DDP_CHECK_VALUE(
      tensors.empty(), call, ": expected ", name, " to be empty on all ranks but ", root, ", got ",
      tensors.size(), " tensor(s) ", on_rank_text(group), ". Pass an empty list there.");
}

void check_shape(
    const char* call, const std::string& name, const at::Tensor& tensor, const at::Tensor& like,
    c10d::ProcessGroup& group) {
  DDP_CHECK_VALUE(
      tensor.sizes() == like.sizes(), call, ": expected ", name, " of shape ", like.sizes(),
      ", got ", tensor.sizes(), " ", on_rank_text(group), ". Make it with that shape.");
}

void check_rank(const char* call, const char* name, int rank, c10d::ProcessGroup& group) {
  DDP_CHECK_VALUE(
      rank >= 0 && rank < group.getSize(), call, ": expected ", name,
      " to be a rank of the group, 0 to ", group.getSize() - 1, ", got ", rank, " ",
      on_rank_text(group), ". Count ranks as get_rank() of that group does.",
      world_rank_hint(rank, group));
}

void check_peer(const char* call, const char* name, int rank, int tag, c10d::ProcessGroup& group) {
  check_rank(call, name, rank, group);
  DDP_CHECK_VALUE(
      rank != group.getRank(), call, ": expected ", name, " to be another rank, got this one ",
      on_rank_text(group), ". What stays on a rank is copied, not sent.",
      world_rank_hint(rank, group));
  check_tag(call, tag, group);
}

void check_any_source(const at::Tensor& tensor, int tag, c10d::ProcessGroup& group) {
  DDP_CHECK_VALUE(
      group.getSize() > 1, "recv: expected another rank of the group to receive from, got a group ",
      "of one rank. What stays on a rank is copied, not sent.");
  check_tag("recv", tag, group);
  DDP_CHECK_VALUE(
      capabilities_of(group, tensor.device()).receives_from_any,
      "recv: expected a rank in src, for backend ", backend_name(group, tensor.device().type()),
      " cannot receive from any rank, got std::nullopt ", on_rank_text(group),
      ". Name the sender, or receive a CPU tensor in a group with a backend for it, as in "
      "backend(\"cpu:gloo,cuda:nccl\").");
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

void WireTensor::copy_back() const {
  if (!is_copy()) return;
  auto to = tensor.detach();
  auto from = wire;
  if (from.scalar_type() != to.scalar_type()) from = from.reshape({-1}).view(to.scalar_type());
  to.copy_(from.view(to.sizes()));
}

WireTensor wire_of(const at::Tensor& tensor) {
  const auto plain = contiguous(tensor);
  return {tensor, is_sent_as_is(plain.scalar_type()) ? plain : as_bytes(plain)};
}

WireTensor apart_from(const std::vector<WireTensor>& outputs, WireTensor input, bool in_place) {
  const auto is_shared = [&](const WireTensor& output) {
    return share_memory(input.wire, output.wire);
  };
  if (!in_place && any_of(outputs, is_shared)) input.wire = input.wire.clone();
  return input;
}

bool begin_alike(const at::Tensor& one, const at::Tensor& other) {
  return one.const_data_ptr() == other.const_data_ptr();
}

WireTensor message_wire_of(const at::Tensor& tensor, c10d::ProcessGroup& group) {
  const bool takes_all = capabilities_of(group, tensor.device()).falls_back_to_gloo;
  return takes_all ? WireTensor{tensor, contiguous(tensor)} : wire_of(tensor);
}

std::vector<WireTensor> wires_of(const std::vector<at::Tensor>& tensors) {
  return c10::fmap(tensors, wire_of);
}

std::vector<at::Tensor> wire_tensors(const std::vector<WireTensor>& wires) {
  return c10::fmap(wires, [](const auto& wire) { return wire.wire; });
}

WireTensor reduction_wire_of(const at::Tensor& tensor, const WireReduction& reduction) {
  const auto plain = contiguous(tensor);
  if (plain.is_complex()) return {tensor, at::view_as_real(plain)};
  if (plain.scalar_type() == reduction.dtype) return {tensor, plain};
  return {tensor, plain.view(reduction.dtype)};
}

StartedCall copying_out(
    StartedCall call, std::vector<WireTensor> outputs, const std::vector<WireTensor>& inputs,
    int divisor) {
  auto copies = std::move(call.buffers);
  for (const auto& output : outputs) {
    if (output.is_copy()) copies.push_back(output.wire);
  }
  for (const auto& input : inputs) {
    // The backends of the CPU keep what they send.
    if (!input.wire.is_cpu() && input.is_copy()) copies.push_back(input.wire);
  }
  if (call.parts.size() == 1 && copies.empty() && divisor == 1) return call;
  call.buffers = std::move(copies);
  call.outputs = caller_tensors(outputs);
  call.finish = [before = std::move(call.finish), outputs = std::move(outputs), divisor] {
    if (before) before();
    for (const auto& output : outputs) {
      if (divisor != 1) at::Tensor(output.wire).div_(divisor);
      output.copy_back();
    }
  };
  return call;
}

}  // namespace ddp
