// Streams for copies between the host and a device, beside the one that computes.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace ddp {

enum class CopyWay { Up, Down };

/// The stream of a device for copies to it, or from it: the same for all users, since a device has
/// few streams. It waits for what the current one has to do.
///
/// Memory of the current stream that it uses needs a record_stream(), or has to live until the
/// current stream has waited for the copy.
c10::Stream copy_stream_after_current(c10::Device device, CopyWay way);

}  // namespace ddp
