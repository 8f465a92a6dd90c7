// One function per backend: makes its c10d::Backend over a store that all ranks share.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "../deadline.h"
#include "../interface.h"
#include "../own_gpu.h"

namespace ddp::backends {

/// What every backend is made from.
struct Setup {
  c10::intrusive_ptr<c10d::Store> store;  // of this backend alone
  int rank = 0;
  int world_size = 1;
  std::chrono::milliseconds timeout{0};  // of its collectives
  Deadline connect_by{timeout};
  std::string group_name;
  std::vector<uint64_t> global_ranks;  // of the group's members, in group order
  std::string host;                    // ranks with the same share memory; empty: found out
};

/// Connects all pairs of ranks before it returns.
c10::intrusive_ptr<c10d::Backend> make_gloo(const Setup& setup, const GlooDevices& devices);

/// A backend, or why there is none: the same on all ranks.
struct Shared {
  c10::intrusive_ptr<c10d::Backend> backend;
  std::string why_not;
};

using ConnectGloo = std::function<c10::intrusive_ptr<c10d::Backend>(const Setup&)>;

/// Maps the memory of a host's ranks into each other, if there are any such and they may; over
/// several hosts, their first ranks do the rest.
///
/// \param gloo  for what shared memory is not made for.
/// \param connect_gloo  makes the backend between hosts.
///
/// Collective: yes. Blocks: host, until the deadline.
Shared make_shm(
    const Setup& setup, const c10::intrusive_ptr<c10d::Backend>& gloo,
    const ConnectGloo& connect_gloo);

/// The GPU that this process would use NCCL with, or why it cannot, such as that NCCL is not built
/// in. Loads the CUDA driver.
OwnGpu find_gpu(const std::optional<Setting>& local_rank);

/// Connects nothing yet: NCCL does so in the first collective, on the device of its tensors.
c10::intrusive_ptr<c10d::Backend> make_nccl(const Setup& setup);

/// Makes this GPU the current one of the calling thread.
void use_cuda_device(int index);

}  // namespace ddp::backends
