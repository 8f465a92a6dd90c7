// new_stream() where LibTorch has its CUDA part.
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "device/new_stream.h"

namespace ddp {

// LibTorch's own new streams are those of its pool, which the program has, too.
c10::Stream new_stream(c10::Device device) {
  if (!device.is_cuda()) return c10::impl::VirtualGuardImpl(device.type()).getNewStream(device);
  const c10::DeviceGuard guard(device);
  cudaStream_t stream = nullptr;
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return c10::cuda::getStreamFromExternal(stream, device.index());
}

}  // namespace ddp
