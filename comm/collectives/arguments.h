// The arguments of collectives: their checks, before anything is sent, and the memory that goes to
// a backend in the place of the caller's tensors.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "work/collective_handle.h"

namespace ddp {

// Checks of arguments before anything is sent. `call` is the function's name, for the message.

/// Checks for a defined, dense tensor on a device the group has a backend for.
void check_tensor(const char* call, const at::Tensor& tensor, c10d::ProcessGroup& group);

/// Checks for world-size such tensors, of the dtype and on the device of `like`.
void check_list(
    const char* call, const char* name, const std::vector<at::Tensor>& tensors,
    const at::Tensor& like, c10d::ProcessGroup& group);

/// Checks for an empty list, which all ranks but `root` must pass.
void check_no_list(
    const char* call, const char* name, const std::vector<at::Tensor>& tensors, int root,
    c10d::ProcessGroup& group);

void check_shape(
    const char* call, const std::string& name, const at::Tensor& tensor, const at::Tensor& like,
    c10d::ProcessGroup& group);

/// Checks for a rank of the group, in the parameter `name`.
void check_rank(const char* call, const char* name, int rank, c10d::ProcessGroup& group);

/// Checks for another rank of the group, and a tag that backends accept.
void check_peer(const char* call, const char* name, int rank, int tag, c10d::ProcessGroup& group);

/// Checks a receive from any rank: for another rank, the tag, and a backend that can do it.
void check_any_source(const at::Tensor& tensor, int tag, c10d::ProcessGroup& group);

/// The reduction that is passed to the backend.
struct WireReduction {
  c10d::ReduceOp op;
  at::ScalarType dtype;  // of the wires: reduced_as()
  int divisor = 1;       // divides the result afterwards
};

/// \throws c10::ValueError  if the operation has no meaning for the tensor's dtype, or the backend
///         does not support it.
WireReduction wire_reduction(
    const char* call, const c10d::ReduceOp& op, const at::Tensor& tensor,
    c10d::ProcessGroup& group);

/// A caller's tensor and the memory that goes to a backend in its place.
///
/// Backends send memory as it lies, and support few dtypes. So `wire` is contiguous, and has
/// another dtype over the same bytes if the backends do not support the tensor's own.
struct WireTensor {
  at::Tensor tensor;
  at::Tensor wire;

  /// Whether results must be copied from `wire` to `tensor`.
  bool is_copy() const { return !wire.is_alias_of(tensor); }
  void copy_back() const;
};

/// For collectives that only move bytes: sends every dtype, unsupported ones as uint8.
WireTensor wire_of(const at::Tensor& tensor);
std::vector<WireTensor> wires_of(const std::vector<at::Tensor>& tensors);

/// Returns the input, or a copy if it shares memory with an output: a backend may write to that
/// before it has read the input.
///
/// \param in_place  whether they share what this rank gives itself, which no other rank's
/// overwrites.
WireTensor apart_from(
    const std::vector<WireTensor>& outputs, WireTensor input, bool in_place = false);
bool begin_alike(const at::Tensor& one, const at::Tensor& other);

/// For a send or a recv: keeps the tensor's own dtype if the backend accepts every dtype, so that
/// the receiver can compare it.
WireTensor message_wire_of(const at::Tensor& tensor, c10d::ProcessGroup& group);

std::vector<at::Tensor> wire_tensors(const std::vector<WireTensor>& wires);

/// For reductions: complex numbers as pairs of real numbers, others in the dtype of `reduction`.
WireTensor reduction_wire_of(const at::Tensor& tensor, const WireReduction& reduction);

/// The call, with a last step that divides the caller's outputs, and copies them out.
///
/// \param inputs  that are no outputs as well.
StartedCall copying_out(
    StartedCall call, std::vector<WireTensor> outputs, const std::vector<WireTensor>& inputs = {},
    int divisor = 1);

}  // namespace ddp
