#pragma once

#include <atomic>

#include <c10/core/Device.h>

namespace ddp {

/// Whether the current stream of `device` records what it is given, for a graph that is replayed
/// later (cudaStreamBeginCapture), and runs nothing. The host then may neither wait for the device
/// nor look whether it is done, and what it writes into its own memory is not repeated in a replay.
///
/// Cost: one call of the CUDA runtime on a GPU; nothing on the CPU.
bool is_capturing(c10::Device device);

/// What it says of the CPU, for tests, which have no GPU.
extern std::atomic<bool> pretends_to_capture;

}  // namespace ddp
