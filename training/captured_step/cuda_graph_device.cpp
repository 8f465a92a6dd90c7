// Compiled where LibTorch has its CUDA part; no_cuda_graph_device.cpp elsewhere.
#include <exception>
#include <optional>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <ddp/internal/check.h>

#include "captured_step/capture_sequence.h"

namespace ddp {
namespace {

class CudaGraphDevice : public GraphDevice {
 public:
  void check_stream() override {
    const auto current = c10::cuda::getCurrentCUDAStream();
    DDP_CHECK(
        current != c10::cuda::getDefaultCUDAStream(),
        "CapturedStep: expected a current stream other than the default one, got that one. Put "
        "c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool()) before the model is "
        "wrapped.");
    if (!stream_) stream_ = current;
    DDP_CHECK(
        current == *stream_, "CapturedStep: expected the stream of its first call, ", *stream_,
        ", to be the current one, got ", current, ". Keep one CUDAStreamGuard around the loop.");
  }

  void begin_capture() override {
    c10::cuda::device_synchronize();
    graph_.emplace();
    // Threads that pin memory meanwhile, as a prefetching loader's, do no harm.
    graph_->capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  }

  void end_capture() override { graph_->capture_end(); }

  void discard_capture() noexcept override {
    try {
      graph_->capture_end();
    } catch (const std::exception&) {
      // The capture is invalid, and has ended.
    }
    (void)cudaGetLastError();  // otherwise the next error check would find it
    graph_.reset();
  }

  void replay() override { graph_->replay(); }

  void reset() noexcept override {
    if (!graph_) return;
    try {
      stream_->synchronize();
      graph_.reset();
    } catch (const std::exception&) {
      // CUDA has failed: the program's next call of it throws.
    }
  }

 private:
  std::optional<c10::cuda::CUDAStream> stream_;
  std::optional<at::cuda::CUDAGraph> graph_;
};

}  // namespace

std::unique_ptr<GraphDevice> make_cuda_graph_device() {
  return std::make_unique<CudaGraphDevice>();
}

}  // namespace ddp
