#pragma once

#include <functional>
#include <memory>

namespace ddp {

/// Has `act` called before a group that carries tensors of a device is shut down, while the
/// returned handle exists: NCCL waits for the end of graphs that hold its collectives.
///
/// \param act  must not throw, nor destroy its own handle. Runs on the thread that shuts down.
std::shared_ptr<void> call_before_shutdown(std::function<void()> act);

/// Calls all of them.
void run_before_shutdown();

}  // namespace ddp
