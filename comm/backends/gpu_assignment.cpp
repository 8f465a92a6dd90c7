#include "backends/gpu_assignment.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

// Returns why another rank uses this rank's GPU too; empty if none does.
std::string why_shared(const StartupBarrier& barrier, c10d::Store& votes, const std::string& id) {
  const auto mine = std::to_string(barrier.rank);
  const auto first = votes.compareSet("gpu/" + id, "", mine);
  if (first == mine) return "";
  return ddp::str(
      "expected a GPU for each rank, got the same one for ranks ", first, " and ", mine, ", ", id,
      ". Start one process per GPU, or use backend(\"gloo\")");
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

bool all_have_gpus(
    const StartupBarrier& barrier, c10d::Store& votes, const GpuAssignment& mine,
    const std::string& required_by) {
  auto why_not = mine.why_not;
  if (why_not.empty() && !mine.id.empty()) why_not = why_shared(barrier, votes, mine.id);
  if (!why_not.empty()) votes.set("one has not", "1");
  const bool is_problem = !required_by.empty() && !why_not.empty();
  run_startup_barrier(
      barrier, "its GPU", is_problem ? "backend " + required_by + ": " + why_not + "." : "");
  return !votes.check({"one has not"});
}

}  // namespace ddp
