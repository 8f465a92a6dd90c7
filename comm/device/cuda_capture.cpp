// is_capturing() where LibTorch has its CUDA part.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <ddp/internal/current_stream.h>

namespace ddp {

bool is_capturing(c10::Device device) {
  if (!device.is_cuda()) return false;
  auto status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device.index()), &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace ddp
