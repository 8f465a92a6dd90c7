#include <ddp/internal/check.h>

#include "captured_step/capture_sequence.h"

namespace ddp {
namespace {

class NoGraphDevice : public GraphDevice {
 public:
  void check_stream() override {
    DDP_CHECK(
        false, "CapturedStep: expected a build with CUDA, got one without. Build ddp with a CUDA ",
        "build of LibTorch and the CUDA toolkit (-DDDP_WITH_CUDA=ON), or call the step itself.");
  }
  void begin_capture() override {}
  void end_capture() override {}
  void discard_capture() noexcept override {}
  void replay() override {}
  void reset() noexcept override {}
};

}  // namespace

std::unique_ptr<GraphDevice> make_cuda_graph_device() { return std::make_unique<NoGraphDevice>(); }

}  // namespace ddp
