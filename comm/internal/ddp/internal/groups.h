// Process groups: what is beyond their public functions.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <ddp/collective_backend.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>
#include <ddp/process_group.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

// Methods of c10d::ProcessGroup that later LibTorch renames, with warnings about the old names.
// collective_backend.h has the names of c10d::Backend's.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
#define DDP_GROUP_ALL_GATHER_SINGLE all_gather_single
#define DDP_GROUP_REDUCE_SCATTER_SINGLE reduce_scatter_single
#define DDP_GROUP_ALL_TO_ALL_SINGLE all_to_all_single
#else
#define DDP_GROUP_ALL_GATHER_SINGLE _allgather_base
#define DDP_GROUP_REDUCE_SCATTER_SINGLE _reduce_scatter_base
#define DDP_GROUP_ALL_TO_ALL_SINGLE alltoall_base
#endif

namespace ddp {

class P2POp;

/// "on rank 1 of 2".
inline std::string on_rank_text(const c10d::ProcessGroup& group) {
  return ddp::str("on rank ", group.getRank(), " of ", group.getSize());
}

/// The device on which the group can send data from host memory: the CPU if the group has a backend
/// for it, else its other device, as with NCCL alone (then the current GPU).
inline at::Device carrier_device(c10d::ProcessGroup& group) {
  const auto devices = group.getDeviceTypes();
  const auto is_cpu = [](const at::Device& device) { return device.is_cpu(); };
  if (devices.empty() || any_of(devices, is_cpu)) return at::kCPU;
  return devices.front();
}

/// How many processes both groups have. Nothing if that is not known: they are two groups, and not
/// of one job of this library.
std::optional<int64_t> count_common_ranks(const c10d::ProcessGroup& a, const c10d::ProcessGroup& b);

/// Whether the groups have the same ranks; null is none.
inline bool have_same_ranks(const ProcessGroup& a, const ProcessGroup& b) {
  if (a == b || !a || !b || a->getSize() != b->getSize()) return a == b;
  return count_common_ranks(*a, *b) == a->getSize();
}

/// batch_isend_irecv() with a text of its own for errors of its handles.
///
/// \param where  what the messages are; empty: the name of the call.
std::vector<c10::intrusive_ptr<c10d::Work>> start_messages(
    const std::vector<P2POp>& ops, const ProcessGroup& group,
    const std::function<std::string()>& where);

/// How many collectives and messages this thread has started in groups of several ranks.
uint64_t calls_of_this_thread();

/// A group of the same ranks over Gloo, for what hosts tell each other beside their devices.
///
/// \param group  that this library made.
///
/// Collective: yes, over `group`. Blocks: host. Cost: as new_group().
ProcessGroup new_host_group(const ProcessGroup& group);

/// c10d's default if the group's backend does not report one.
std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group);

/// Makes another group the default group; empty: none. The previous one is not shut down.
///
/// \return  the previous one.
ProcessGroup replace_default_group(ProcessGroup group);

/// Records that this rank calls a function whose backward pass is a collective of `group` if
/// `tensor` requires a gradient. Ranks of which some do not require it are found by their calls
/// once one of them waits for another.
///
/// \param has_equal_sizes  whether `tensor` has as many elements on all ranks.
void record_differentiable_call(
    const ProcessGroup& group, const at::Tensor& tensor, bool requires_gradient,
    bool has_equal_sizes = true);

/// Has `act` called before a group that carries tensors of a device is shut down, while the
/// returned handle exists: NCCL waits for the end of graphs that hold its collectives.
///
/// \param act  must not throw, nor destroy its own handle. Runs on the thread that shuts down.
std::shared_ptr<void> call_before_shutdown(std::function<void()> act);

/// Calls all of them.
void run_before_shutdown();

}  // namespace ddp
