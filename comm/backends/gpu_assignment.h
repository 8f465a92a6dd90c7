#pragma once

#include <optional>
#include <string>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/environment.h"
#include "store/startup_barrier.h"

namespace ddp {

/// A rank's GPU, as determined before its backend is made: NCCL's, or one of the program's own.
struct GpuAssignment {
  std::string why_not;        // why this rank has none for the backend; empty when it can
  std::optional<int> device;  // the GPU to make current; nothing: the program selects it
  std::string id;             // identifies the physical GPU in the whole world; empty: unknown
};

/// How many devices of the type this process sees: 0 also if LibTorch has no such devices.
int visible_devices(c10::DeviceType type);

/// Chooses among the GPUs that this process sees: the only one, whatever the local rank, because
/// launchers may show each process only its own; else the one with the local rank's number.
///
/// \param device_id  that the user named, instead.
/// \param type  of the GPUs, or other devices with streams.
/// \throws c10::ValueError  if the local rank is needed and malformed.
GpuAssignment choose_gpu(
    const std::optional<Setting>& local_rank, int visible_gpus,
    const std::optional<c10::Device>& device_id = {}, c10::DeviceType type = c10::kCUDA);

/// A warning that names a rank without a GPU where others have one; "" where all have one, or none.
///
/// \param first  of those without: its rank, its host and the reason.
std::string describe_gpus_for_some(int without, int world_size, const std::string& first);

/// Whether every rank has a GPU of its own, so that all of them can use the backend. Rank 0 warns
/// if only some have one.
///
/// A rank cannot decide this alone: another rank may see other GPUs, or the same one.
///
/// \param votes  a store that nothing else writes to.
/// \param required_by  the backend that the user named: a rank without a GPU of its own is an
///        error. Empty: it is not an error.
/// \return  the same on all ranks.
/// \throws c10::Error  if required: on every rank, with the reason of a rank that has no GPU.
///
/// Collective: yes. Blocks: host, as `run_startup_barrier` does.
bool all_have_gpus(
    const StartupBarrier& barrier, c10d::Store& votes, const GpuAssignment& mine,
    const std::string& required_by);

}  // namespace ddp
