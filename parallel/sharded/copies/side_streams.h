// Streams of a device beside the one that computes.
#pragma once

#include <c10/core/StreamGuard.h>

namespace ddp {

/// The same for all units, since a device has few streams.
enum class SideStream {
  Uploads,    ///< copies from the host
  Downloads,  ///< copies to the host
  Sums        ///< what follows a sum of gradients while backward goes on
};

/// While it exists, a side stream is the device's current one. That runs after all that the stream
/// which was current before has to do, so that both may use its memory.
class SideStreamGuard {
 public:
  SideStreamGuard(c10::Device device, SideStream stream);

 private:
  c10::StreamGuard guard_;
};

}  // namespace ddp
