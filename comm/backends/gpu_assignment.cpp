#include "backends/gpu_assignment.h"

#include <algorithm>
#include <string>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <ddp/internal/system/host.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

// Returns why another rank uses this rank's GPU too; empty if none does.
std::string why_shared(const StartupBarrier& barrier, c10d::Store& votes, const std::string& id) {
  const auto mine = std::to_string(barrier.rank);
  const auto first = votes.compareSet("gpu/" + id, "", mine);
  if (first == mine) return "";
  const auto ranks = std::minmax({std::stoi(first), barrier.rank});
  return ddp::str(
      "expected a GPU for each rank, got the same one for ranks ", ranks.first, " and ",
      ranks.second, ", ", id, ". Start one process per GPU, or use backend(\"gloo\")");
}

}  // namespace

int visible_devices(c10::DeviceType type) {
  if (!c10::impl::hasDeviceGuardImpl(type)) return 0;
  return c10::impl::VirtualGuardImpl(type).deviceCount();
}

GpuAssignment choose_gpu(
    const std::optional<Setting>& local_rank, int visible_gpus,
    const std::optional<c10::Device>& device_id, c10::DeviceType type) {
  const bool is_cuda = type == c10::kCUDA;
  const auto name = c10::DeviceTypeName(type, /*lower_case=*/true);
  GpuAssignment gpu;
  if (visible_gpus == 0) {
    gpu.why_not = ddp::str(
        "expected a GPU", is_cuda ? "" : " (" + name + ")", ", but this process sees none. Check ",
        is_cuda ? "nvidia-smi and CUDA_VISIBLE_DEVICES" : "its driver and LibTorch's part for it",
        ", or use backend(\"gloo\")");
  } else if (device_id && device_id->index() >= visible_gpus) {
    gpu.why_not = ddp::str(
        "expected a device_id from ", name, ":0 to ", name, ":", visible_gpus - 1, ", got ",
        *device_id, ". Give one of the GPUs that this process sees, or leave device_id out");
  } else if (device_id) {
    gpu.device = device_id->index();
  } else if (visible_gpus == 1) {
    gpu.device = 0;
  } else if (local_rank) {
    gpu.device = parse_int(*local_rank, {0}, kLauncherRemedy);
    if (*gpu.device < visible_gpus) return gpu;
    gpu.device.reset();
    gpu.why_not = ddp::str(
        "expected ", local_rank->name, " from 0 to ", visible_gpus - 1, ", for this process sees ",
        visible_gpus, " GPUs, got \"", local_rank->value, "\". Start one process per GPU",
        is_cuda ? ", show each process its own one in CUDA_VISIBLE_DEVICES," : "",
        " or use backend(\"gloo\")");
  }
  return gpu;
}

std::string describe_gpus_for_some(int without, int world_size, const std::string& first) {
  if (without == 0 || without == world_size) return "";
  return ddp::str(
      without, " of ", world_size,
      without == 1 ? " ranks has no GPU of its own" : " ranks have no GPU of their own",
      ", so no rank uses the default backend for GPUs: ", first,
      ". To have an error in place of this warning, name the backend, as backend(\"nccl\").");
}

bool all_have_gpus(
    const StartupBarrier& barrier, c10d::Store& votes, const GpuAssignment& mine,
    const std::string& required_by) {
  auto why_not = mine.why_not;
  if (why_not.empty() && !mine.id.empty()) why_not = why_shared(barrier, votes, mine.id);
  constexpr const char* kCount = "without";
  constexpr const char* kFirst = "first without";
  if (!why_not.empty()) {
    votes.add(kCount, 1);
    votes.compareSet(
        kFirst, "", ddp::str("rank ", barrier.rank, " on ", host_name(), " ", why_not));
  }
  const bool is_problem = !required_by.empty() && !why_not.empty();
  run_startup_barrier(
      barrier, "its GPU", is_problem ? "backend " + required_by + ": " + why_not + "." : "");
  const auto without = static_cast<int>(votes.add(kCount, 0));
  if (without > 0 && barrier.rank == 0) {
    const auto some = describe_gpus_for_some(without, barrier.world_size, votes.get_to_str(kFirst));
    if (!some.empty()) TORCH_WARN(barrier.subject, ": ", some);
  }
  return without == 0;
}

}  // namespace ddp
