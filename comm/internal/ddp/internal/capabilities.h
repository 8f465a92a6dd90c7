#pragma once

#include <c10/core/Device.h>
#include <ddp/internal/reduction_table.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp {

/// What a backend can do beyond what c10d asks of every backend. The defaults hold for any.
struct BackendCapabilities {
  /// It knows ReduceOp::AVG for floating-point tensors: one pass over the memory less than a
  /// division before a sum, and it does not overflow either.
  bool averages = false;
  /// It reduces tensors from its allocateTensor() without copies in and out, and buckets are to lie
  /// there. Only where Backend::supportsTensorAlloc() says yes for the device. Ranks have to agree;
  /// the wrapper compares the answers when it is made (with init_sync).
  bool reduces_in_own_memory = true;
  /// A wait for one of its collectives holds up the current stream, and not the host.
  bool waits_on_stream = false;
  /// Gloo carries what the backend does not carry itself: for Gloo, everything.
  bool falls_back_to_gloo = false;
  /// Its alltoall() takes a tensor for each rank. Where not, its alltoall_base() takes one flat
  /// one.
  bool exchanges_lists = true;
  /// What it reduces itself, and so what is refused before anything is sent. Null: not known, the
  /// backend says what it refuses.
  const ReductionTable* reductions = nullptr;
};

/// What the group's backend for `device` can do.
///
/// The registry of backends knows a backend by its getBackendName(). The defaults hold for one that
/// is not there, such as a program's own.
///
/// Cost: a search by name; not for code that runs once a gradient.
BackendCapabilities capabilities_of(c10d::ProcessGroup& group, c10::Device device);

}  // namespace ddp
