#pragma once

#include <c10/core/Device.h>

namespace ddp {

/// Whether the current stream of `device` is being captured into a graph that is replayed later
/// (cudaStreamBeginCapture), so that it runs nothing now. The host must then neither wait for the
/// device nor query it, and host writes of the step are not repeated in a replay.
///
/// Cost: one call of the CUDA runtime on a GPU; nothing on the CPU.
bool is_capturing(c10::Device device);

}  // namespace ddp
