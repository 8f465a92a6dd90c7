// A backend for messages between ranks that are threads, in the memory of the toy device. It moves
// them as NCCL does: a batch is a piece of work on a stream that the rank has for all its messages,
// after what its current stream had to do then; it begins after the batch before, and a message
// moves when both its ranks' batches have begun. Nothing keeps the memory for it.
#pragma once

#include <string>

#include <c10/core/Stream.h>

namespace ddp::testing::toy {

/// Adds it, once a process: it says that its waits hold up a stream, for the CPU, too, whose
/// collectives Gloo carries.
///
/// \return  its name.
const char* register_messages();

/// The stream that a rank computes on: one of its own, for all ranks share the device.
c10::Stream rank_stream(int rank);

/// The faults on the streams since the last call; "" for none.
std::string take_faults();

}  // namespace ddp::testing::toy
