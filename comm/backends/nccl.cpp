// Compiled where LibTorch has its CUDA part and nccl.h was found; no_nccl.cpp elsewhere.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <fstream>

#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "backends/nccl.h"

namespace ddp::backends {
namespace {

// By where it is plugged in, as NCCL tells GPUs apart, too. Hosts may have one name in common, but
// not one boot. Empty when CUDA does not say.
std::string id_of(int device) {
  char place[64] = "";
  if (cudaDeviceGetPCIBusId(place, sizeof place, device) != cudaSuccess) {
    (void)cudaGetLastError();  // or the next check would take it for its own
    return "";
  }
  char host[256] = "";
  (void)gethostname(host, sizeof host - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return c10::str("GPU ", place, " of host ", host, " (boot ", boot, ")");
}

}  // namespace

GpuAssignment find_gpu(const std::optional<Setting>& local_rank) {
  auto gpu = choose_gpu(local_rank, c10::cuda::device_count());
  if (gpu.device) gpu.id = id_of(*gpu.device);
  return gpu;
}

BackendPtr make_nccl(const Setup& setup) {
  // Or kernels of the computation that are queued already would go first, and hold a bucket up.
  auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
  options->timeout = setup.timeout;
  options->group_name = setup.group_name;
  options->global_ranks_in_group = setup.global_ranks;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(
      setup.store, setup.rank, setup.world_size, std::move(options));
}

void use_cuda_device(int index) { c10::cuda::set_device(static_cast<c10::DeviceIndex>(index)); }

}  // namespace ddp::backends
