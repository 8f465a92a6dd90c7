// Compiled where LibTorch has its CUDA part and nccl.h was found; no_nccl.cpp elsewhere.
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "backends/backends.h"

namespace ddp::backends {

std::string why_no_nccl(int processes_on_host) {
  const int count = c10::cuda::device_count();
  if (count == 0) {
    return "this process sees no GPU. Check nvidia-smi and CUDA_VISIBLE_DEVICES, or use "
           "backend(\"gloo\")";
  }
  if (count >= processes_on_host) return "";
  return c10::str(
      "it needs a GPU for each of this host's ", processes_on_host, " processes, and there is ",
      count, ". Start fewer processes per host, or use backend(\"gloo\")");
}

c10::intrusive_ptr<c10d::Backend> make_nccl(const Setup& setup) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = setup.timeout;
  options->group_name = setup.group_name;
  options->global_ranks_in_group = setup.global_ranks;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(
      setup.store, setup.rank, setup.world_size, std::move(options));
}

void use_cuda_device(int index) { c10::cuda::set_device(static_cast<c10::DeviceIndex>(index)); }

}  // namespace ddp::backends
