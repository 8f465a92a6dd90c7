#include "device/stream_capture.h"

#include <ddp/internal/current_stream.h>

namespace ddp {

bool is_capturing(c10::Device device) {
  return device.is_cuda() && is_capturing_on_cuda(device.index());
}

}  // namespace ddp
