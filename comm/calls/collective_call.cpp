#include "calls/collective_call.h"

#include <array>

#include <c10/core/ScalarType.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/reduction_table.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

constexpr std::array kKinds{
    "all_reduce", "broadcast", "all_gather", "reduce_scatter",      "barrier",     "reduce",
    "gather",     "scatter",   "all_to_all", "differentiable call", "send or recv"};

}  // namespace

uint64_t CollectiveCall::hash() const {
  uint64_t hash = mixed(1, static_cast<uint64_t>(kind));
  for (const int64_t field : {int64_t{dtype}, int64_t{reduction}, int64_t{root}}) {
    hash = mixed(hash, static_cast<uint64_t>(field));
  }
  return mixed(mixed(mixed(hash, tensors), sizes), numel);
}

bool CollectiveCall::is_known() const {
  return static_cast<size_t>(kind) < kKinds.size() && dtype >= -1 &&
         dtype < static_cast<int>(c10::ScalarType::NumOptions) && reduction >= -1 &&
         reduction <= static_cast<int>(c10d::ReduceOp::UNUSED);
}

CollectiveCall describe_call(
    CollectiveKind kind, at::ArrayRef<at::Tensor> tensors, int reduction, int64_t root) {
  CollectiveCall call;
  call.kind = kind;
  call.reduction = static_cast<int8_t>(reduction);
  call.root = static_cast<int32_t>(root);
  if (tensors.empty()) return call;
  call.dtype = static_cast<int8_t>(tensors[0].scalar_type());
  if (kind == CollectiveKind::AllToAll) return call;
  call.tensors = static_cast<uint32_t>(tensors.size());
  call.sizes = tensors.size() > 1 ? 1 : 0;
  for (const auto& tensor : tensors) {
    const auto numel = static_cast<uint64_t>(tensor.numel());
    call.numel += numel;
    if (tensors.size() > 1) call.sizes = mixed(call.sizes, numel);
  }
  return call;
}

const char* to_text(CollectiveKind kind) { return kKinds.at(static_cast<size_t>(kind)); }

std::string to_text(const CollectiveCall& call) {
  std::string text = to_text(call.kind);
  if (call.dtype < 0) return text;
  const auto dtype = static_cast<c10::ScalarType>(call.dtype);
  if (call.kind == CollectiveKind::AllToAll) return ddp::str(text, " of ", dtype);
  text += ddp::str(" of ", call.numel, " x ", dtype);
  // The hash of the sizes is shown, because it may be all that differs.
  if (call.tensors > 1) {
    text += ddp::str(" in ", call.tensors, " tensors of sizes #", call.sizes % 10000);
  }
  if (call.kind == CollectiveKind::Differentiable) {
    return text +
           (call.reduction == 1 ? " that requires a gradient" : " that requires no gradient");
  }
  if (call.root >= 0) {
    const bool sends =
        call.kind == CollectiveKind::Broadcast || call.kind == CollectiveKind::Scatter;
    text += ddp::str(sends ? " from rank " : " to rank ", call.root);
  }
  if (call.reduction >= 0) {
    text += ddp::str(", ", to_text(static_cast<ReductionTable::Op>(call.reduction)));
  }
  return text;
}

}  // namespace ddp
