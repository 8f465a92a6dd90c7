#pragma once

#include <c10/core/Device.h>
#include <ddp/internal/reduction_table.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp {

/// The abilities of a backend beyond c10d's requirements. The defaults suit any backend.
struct BackendCapabilities {
  /// It supports ReduceOp::AVG for floating-point tensors: one pass over the memory less than
  /// dividing before a sum, and it cannot overflow either.
  bool averages = false;
  /// It reduces tensors from its allocateTensor() without copies in and out, so buckets should lie
  /// there. Only if Backend::supportsTensorAlloc() is true for the device. All ranks must have the
  /// same value; the wrapper compares the values when it is made (with init_sync).
  bool reduces_in_own_memory = true;
  /// Its allocateTensor() works by now: NCCL's throws until a collective has connected the ranks,
  /// which is at the same call on all of them. Of a group; true in a description.
  bool has_own_memory = true;
  /// A wait for one of its collectives holds up the current stream, and not the host.
  bool waits_on_stream = false;
  /// A watchdog of its own completes Work::getFutureResult() when a collective has ended on the
  /// device, also one that it ends itself after its timeout.
  bool reports_results = false;
  /// Its allreduce() takes sparse tensors.
  bool reduces_sparse = true;
  /// Gloo carries the collectives that the backend does not carry itself. For Gloo: all of them.
  bool falls_back_to_gloo = false;
  /// Its alltoall() takes one tensor per rank. If not, its alltoall_base() takes one flat tensor.
  bool exchanges_lists = true;
  /// The reductions that it supports; others are refused before anything is sent. Null: unknown, so
  /// the backend itself reports what it does not support.
  const ReductionTable* reductions = nullptr;
};

/// Returns what the group's backend for `device` can do.
///
/// A group of this library has looked its backends up in the registry when it was made, by the name
/// that it was made with. In a group of another class the backend's getBackendName() is searched
/// for. A backend that is not registered has the defaults.
BackendCapabilities capabilities_of(c10d::ProcessGroup& group, c10::Device device);

}  // namespace ddp
