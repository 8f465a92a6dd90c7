#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "collectives/reduction_check.h"
#include "work/collective_handle.h"

namespace ddp {

/// A caller's tensor and the memory that goes to a backend in its place.
///
/// Backends send memory as it lies, and support few dtypes. So `wire` is contiguous, and has
/// another dtype over the same bytes if the backends do not support the tensor's own.
struct Wire {
  at::Tensor tensor;
  at::Tensor wire;

  /// Whether results must be copied from `wire` to `tensor`.
  bool is_copy() const { return !wire.is_alias_of(tensor); }
  void copy_back() const;
};

/// For collectives that only move bytes: sends every dtype, unsupported ones as uint8.
Wire wire_of(const at::Tensor& tensor);
std::vector<Wire> wires_of(const std::vector<at::Tensor>& tensors);

/// Returns the input, or a copy if it shares memory with an output: a backend may write to that
/// before it has read the input.
///
/// \param in_place  whether they share what this rank gives itself, which no other rank's
/// overwrites.
Wire apart_from(const std::vector<Wire>& outputs, Wire input, bool in_place = false);
bool begin_alike(const at::Tensor& one, const at::Tensor& other);

/// For a send or a recv: keeps the tensor's own dtype if the backend accepts every dtype, so that
/// the receiver can compare it.
Wire message_wire_of(const at::Tensor& tensor, c10d::ProcessGroup& group);

std::vector<at::Tensor> wire_tensors(const std::vector<Wire>& wires);
std::vector<at::Tensor> caller_tensors(const std::vector<Wire>& wires);

/// For reductions: complex numbers as pairs of real numbers, others in the dtype of `reduction`.
Wire reduction_wire_of(const at::Tensor& tensor, const WireReduction& reduction);

/// The call, with a last step that divides the caller's outputs, and copies them out.
///
/// \param inputs  that are no outputs as well.
StartedCall copying_out(
    StartedCall call, std::vector<Wire> outputs, const std::vector<Wire>& inputs = {},
    int divisor = 1);

}  // namespace ddp
