#pragma once

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

#include "work/collective_handle.h"

namespace ddp {

/// Whether the handle's wait() makes the stream wait, where the backend does that, or always the
/// host.
enum class WaitOn { Stream, Host };

/// Starts a collective whose handle waits with the group's monitor. A group of one rank, and one
/// that this library did not make, have none.
///
/// \param name  "all_reduce", for error texts.
/// \param device  of the tensors.
/// \param start  starts the collective in a backend, with arguments that were checked before.
/// \param peers  the ranks whose part in it the handle waits for.
/// \throws c10::DistBackendError  if the group is aborted, or if `start` throws, which aborts it.
WorkPtr monitored(
    const char* name, c10d::ProcessGroup& group, c10::Device device,
    c10::function_ref<StartedCall()> start, Peers peers = Peers::All,
    WaitOn wait_on = WaitOn::Stream);

/// The same for a message.
///
/// \param peer  the rank of the group that sends or receives it.
WorkPtr monitored_message(
    bool sends, int peer, int tag, c10d::ProcessGroup& group, c10::Device device,
    c10::function_ref<StartedCall()> start);

}  // namespace ddp
