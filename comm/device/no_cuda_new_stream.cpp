// new_stream() where LibTorch has no CUDA part.
#include <c10/core/impl/VirtualGuardImpl.h>

#include "device/new_stream.h"

namespace ddp {

c10::Stream new_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getNewStream(device);
}

}  // namespace ddp
