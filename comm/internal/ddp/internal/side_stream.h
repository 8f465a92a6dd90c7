// Streams of a device beside the one that computes.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

namespace ddp {

enum class SideStream {
  Uploads,    ///< copies from the host
  Downloads,  ///< copies to the host
  Sums,       ///< what follows a sum of gradients while backward goes on
  Times       ///< waits that must hold up no work of the program, which may have any pooled stream
};

/// A side stream of a device: the same for all users, since a device has few streams. Times is a
/// stream that nothing else has, where the device has such streams; the others are of its pool.
c10::Stream side_stream(c10::Device device, SideStream which);

/// The same stream, which waits for what the current one has to do.
///
/// Memory of the current stream that it uses needs a record_stream(), or has to live until the
/// current stream has waited for it.
c10::Stream side_stream_after_current(c10::Device device, SideStream which);

/// While it exists, that stream is the device's current one.
class SideStreamGuard {
 public:
  SideStreamGuard(c10::Device device, SideStream which)
      : guard_(side_stream_after_current(device, which)) {}

 private:
  c10::StreamGuard guard_;
};

}  // namespace ddp
