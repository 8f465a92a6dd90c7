#include "device/stream_capture.h"

#include <ddp/internal/stream_capture.h>

namespace ddp {

std::atomic<bool> pretends_to_capture{false};

bool is_capturing(c10::Device device) {
  if (device.is_cuda()) return is_capturing_on_cuda(device.index());
  return pretends_to_capture;
}

}  // namespace ddp
