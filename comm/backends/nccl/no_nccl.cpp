// Compiled instead of nccl.cpp where LibTorch has no CUDA part or nccl.h was not found.
#include <ddp/internal/check.h>

#include "backends/nccl/nccl.h"

namespace ddp::backends {

constexpr const char* kWhyNot =
    "it is not built in. Build ddp with a CUDA build of LibTorch and the CUDA toolkit "
    "(-DDDP_WITH_CUDA=ON), or use backend(\"gloo\")";

std::string why_no_nccl() { return kWhyNot; }

BackendPtr make_nccl(const Setup& /*setup*/) { DDP_CHECK(false, "backend nccl: ", kWhyNot, "."); }

void sit_out_nccl(const Setup& /*setup*/) {}

bool nccl_is_connected(c10d::Backend& /*backend*/) { return false; }

c10::intrusive_ptr<c10d::Work> nccl_without_tensors(c10d::Work& /*work*/) { return {}; }

std::string id_of_gpu(int /*device*/) { return ""; }

}  // namespace ddp::backends
