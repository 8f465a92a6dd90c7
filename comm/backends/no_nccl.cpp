// Compiled instead of nccl.cpp where LibTorch has no CUDA part or nccl.h was not found.
#include <c10/util/Exception.h>

#include "backends/backends.h"

namespace ddp::backends {

std::string why_no_nccl(int /*processes_on_host*/) {
  return "it is not built in. Build ddp with a CUDA build of LibTorch and the CUDA toolkit "
         "(-DDDP_WITH_CUDA=ON)";
}

c10::intrusive_ptr<c10d::Backend> make_nccl(const Setup& /*setup*/) {
  TORCH_CHECK(false, "backend nccl: ", why_no_nccl(1), ".");
}

void use_cuda_device(int /*index*/) { TORCH_CHECK(false, "backend nccl: ", why_no_nccl(1), "."); }

}  // namespace ddp::backends
