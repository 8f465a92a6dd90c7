// A collective as one rank calls it.
#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <ddp/collective.h>

namespace ddp {

/// The properties that all ranks of a group must call alike. Ranks whose calls differ wait for each
/// other, or overwrite each other's memory.
struct CollectiveCall {
  CollectiveKind kind = CollectiveKind::Barrier;
  int8_t dtype = -1;      // at::ScalarType; -1: no tensors
  int8_t reduction = -1;  // c10d::ReduceOp::RedOpType; -1: reduces nothing
  int32_t root = -1;      // a rank of the group; -1: has none
  uint32_t tensors = 1;   // how many tensors hold the elements
  uint64_t sizes = 0;     // a hash of the tensors' numbers of elements, where there are several
  uint64_t numel = 0;     // of all tensors; 0 for an all-to-all, whose sizes differ by rank

  bool operator==(const CollectiveCall& other) const {
    return kind == other.kind && dtype == other.dtype && reduction == other.reduction &&
           root == other.root && tensors == other.tensors && sizes == other.sizes &&
           numel == other.numel;
  }
  bool operator!=(const CollectiveCall& other) const { return !(*this == other); }

  /// A hash of all members: calls with different hashes differ.
  uint64_t hash() const;
  /// Whether to_text() supports all values. False for a call that another program, or another
  /// version of the library, has written.
  bool is_known() const;
};

/// \param tensors  those whose sizes and dtype are the same on all ranks: the output of a scatter,
///        the input of a gather.
CollectiveCall describe_call(
    CollectiveKind kind, at::ArrayRef<at::Tensor> tensors, int reduction = -1, int64_t root = -1);

/// "all_reduce".
const char* to_text(CollectiveKind kind);
/// "all_reduce of 10 x Float, SUM".
std::string to_text(const CollectiveCall& call);

}  // namespace ddp
