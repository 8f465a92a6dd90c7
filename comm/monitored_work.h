#pragma once

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/process_group.h>

namespace ddp {

/// Starts a collective whose handle waits with the group's monitor. A group of one, or one that
/// this library did not make, has none: then the handle is the backend's.
///
/// \param name  "all_reduce", for error texts.
/// \param device  of the tensors.
/// \param start  gives the collective to a backend, with arguments that were checked before.
/// \param peers  whose part in it the handle waits for.
/// \throws c10::DistBackendError  when the group is aborted, or `start` throws: then it is.
c10::intrusive_ptr<c10d::Work> monitored(
    const char* name, c10d::ProcessGroup& group, c10::Device device,
    c10::function_ref<c10::intrusive_ptr<c10d::Work>()> start, Peers peers = Peers::All);

}  // namespace ddp
