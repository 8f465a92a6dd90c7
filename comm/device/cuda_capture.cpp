#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "device/stream_capture.h"

namespace ddp {

bool is_capturing_on_cuda(c10::DeviceIndex device) {
  auto status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device), &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace ddp
