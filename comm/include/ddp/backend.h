#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <c10/core/DeviceType.h>
#include <ddp/export.h>
#include <torch/arg.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ddp {

/// What a backend of a program's own is made from.
struct BackendSetup {
  /// Of this backend of this group alone. Its operations end in bounded time.
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;  ///< in the group
  int size = 1;  ///< of the group
  /// Of the backend's collectives.
  std::chrono::milliseconds timeout{0};
  std::string group_name;  ///< for messages; groups of the same ranks may share it
  /// The members' ranks in the default group, in the order of the group.
  std::vector<int> global_ranks;
};

/// The properties of a backend of a program's own, for `register_backend`. Each default is safe for
/// any backend.
struct BackendDescription {
  /// Makes the backend of one group. Every member of the group calls it at once.
  using Make = std::function<c10::intrusive_ptr<c10d::Backend>(const BackendSetup&)>;

  /// Whose tensors it carries; at least one.
  TORCH_ARG(std::vector<c10::DeviceType>, devices);
  /// Required.
  TORCH_ARG(Make, make);
  /// A wait for one of its collectives holds up the current stream, and not the host, as NCCL's
  /// does. Default: false
  TORCH_ARG(bool, waits_on_stream) = false;
  /// It supports ReduceOp::AVG for floating-point tensors, and is as fast as with SUM: gradients
  /// are then averaged by it. Default: false
  TORCH_ARG(bool, averages) = false;
  /// Its alltoall() takes one tensor per rank. If not, its alltoall_base() takes a flat one.
  /// Default: true
  TORCH_ARG(bool, exchanges_lists) = true;
  /// Each rank uses one device of its own, by its local rank. The device is current when `make`
  /// runs. It is an error on all ranks if a rank has none. Default: false
  TORCH_ARG(bool, picks_device) = false;
};

/// Adds a backend that `ProcessGroupOptions::backend` can name, as Python's
/// `torch.distributed.Backend.register_backend` does. docs/backends.md has examples.
///
/// Call it before the first group is made, on every rank: a rank that lacks the name makes
/// init_process_group fail on all ranks.
///
/// \param name  of lower-case letters, digits and `_`, a letter first.
/// \throws c10::ValueError  for a name that is malformed or taken, and for a description without
///         `devices` or `make`.
///
/// Thread safety: any thread. Collective: no.
DDP_API void register_backend(const std::string& name, const BackendDescription& description);

}  // namespace ddp
