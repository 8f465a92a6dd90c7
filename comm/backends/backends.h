// One function per backend: makes its c10d::Backend over a store that all ranks share.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "../deadline.h"
#include "../interface.h"

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
};

/// Connects all pairs of ranks before it returns.
c10::intrusive_ptr<c10d::Backend> make_gloo(const Setup& setup, const GlooDevices& devices);

/// Why NCCL cannot be used: not built in, or fewer GPUs than this host has processes that want one
/// each. Empty when it can.
std::string why_no_nccl(int processes_on_host);

/// Connects nothing yet: NCCL does so in the first collective, on the device of its tensors.
c10::intrusive_ptr<c10d::Backend> make_nccl(const Setup& setup);

/// Makes this GPU the current one of the calling thread.
void use_cuda_device(int index);

}  // namespace ddp::backends
