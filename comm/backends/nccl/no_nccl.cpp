// Compiled instead of nccl.cpp where LibTorch has no CUDA part or nccl.h was not found.
#include <ddp/internal/check.h>

#include "backends/nccl/nccl.h"

namespace ddp::backends {
namespace {

constexpr const char* kWhyNot =
    "it is not built in. Build ddp with a CUDA build of LibTorch and the CUDA toolkit "
    "(-DDDP_WITH_CUDA=ON), or use backend(\"gloo\")";

}  // namespace

GpuAssignment find_gpu(
    const std::optional<Setting>& /*local_rank*/, const std::optional<c10::Device>& /*device*/) {
  return {kWhyNot, {}, ""};
}

BackendPtr make_nccl(const Setup& /*setup*/) { DDP_CHECK(false, "backend nccl: ", kWhyNot, "."); }

void use_cuda_device(int /*index*/) { DDP_CHECK(false, "backend nccl: ", kWhyNot, "."); }

}  // namespace ddp::backends
