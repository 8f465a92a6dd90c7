// Compiled where LibTorch has its CUDA part and nccl.h was found; no_nccl.cpp elsewhere.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <fstream>

#include <c10/cuda/CUDAFunctions.h>
#include <ddp/internal/text.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "backends/nccl/nccl.h"

namespace ddp::backends {
namespace {

// Identifies the GPU by its PCI bus id, as NCCL does, with the host's name and boot id, because two
// hosts may have the same name. Empty if CUDA cannot determine the bus id.
std::string id_of(int device) {
  char bus_id[64] = "";
  if (cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, device) != cudaSuccess) {
    (void)cudaGetLastError();  // otherwise the next error check would find this one
    return "";
  }
  char host[256] = "";
  (void)gethostname(host, sizeof host - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return ddp::str("GPU ", bus_id, " of host ", host, " (boot ", boot, ")");
}

}  // namespace

GpuAssignment find_gpu(const std::optional<Setting>& local_rank) {
  auto gpu = choose_gpu(local_rank, c10::cuda::device_count());
  if (gpu.device) gpu.id = id_of(*gpu.device);
  return gpu;
}

BackendPtr make_nccl(const Setup& setup) {
  // Without priority, queued kernels of the backward pass would delay a bucket.
  auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
  options->timeout = setup.timeout;
  options->group_name = setup.group_name;
  options->global_ranks_in_group = setup.global_ranks;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(
      setup.store, setup.rank, setup.world_size, std::move(options));
}

void use_cuda_device(int index) { c10::cuda::set_device(static_cast<c10::DeviceIndex>(index)); }

}  // namespace ddp::backends
