#pragma once

#include <c10/core/Stream.h>

namespace ddp {

/// A stream that nothing else has, where the device has such streams, and is never destroyed.
c10::Stream new_stream(c10::Device device);

}  // namespace ddp
