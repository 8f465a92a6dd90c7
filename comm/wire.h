#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "composite_work.h"

namespace ddp {

/// A caller's tensor and the memory that goes to a backend in its place.
///
/// Backends send memory as it lies, and know a handful of dtypes. So `wire` is contiguous, and has
/// another dtype over the same bytes where the backends do not know the tensor's own.
struct Wire {
  at::Tensor tensor;
  at::Tensor wire;

  /// Whether results have to be copied from `wire` to `tensor`.
  bool is_copy() const { return !wire.is_alias_of(tensor); }
  void copy_back() const;
};

/// For collectives that only move bytes: every dtype travels, the odd ones as uint8.
Wire wire_of(const at::Tensor& tensor);
std::vector<Wire> wires_of(const std::vector<at::Tensor>& tensors);

/// For a send or a recv: the tensor in its own dtype where the backend takes every one, so that the
/// receiver can compare it.
Wire message_wire_of(const at::Tensor& tensor, c10d::ProcessGroup& group);

std::vector<at::Tensor> wire_tensors(const std::vector<Wire>& wires);
std::vector<at::Tensor> caller_tensors(const std::vector<Wire>& wires);

/// How a reduction is put to the backend.
struct WireReduction {
  c10d::ReduceOp op;
  at::ScalarType dtype;  // of the wires: reduced_as()
  int divisor = 1;       // of the result, afterwards
};

/// \throws c10::ValueError  where the operation has no meaning for the tensor's dtype, or the
///         backend does not have it.
WireReduction wire_reduction(
    const char* call, const c10d::ReduceOp& op, const at::Tensor& tensor,
    c10d::ProcessGroup& group);

/// For reductions: complex as pairs of real numbers, others in the dtype of `reduction`.
Wire number_wire_of(const at::Tensor& tensor, const WireReduction& reduction);

/// `works` as one, followed by what the caller's outputs still need: division, copying out.
WorkPtr deliver(std::vector<WorkPtr> works, std::vector<Wire> outputs, int divisor = 1);

}  // namespace ddp
