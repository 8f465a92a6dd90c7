#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace ddp::backends {

/// Makes the backend of a group of one rank: a collective copies its input to its output, or leaves
/// it alone. It has no connections, threads or descriptors, so that an axis of size 1 of a mesh
/// costs nothing.
///
/// \param name  that getBackendName() returns: of the backend in whose place it is.
c10::intrusive_ptr<c10d::Backend> make_single_rank_backend(
    const std::string& name, std::chrono::milliseconds timeout);

}  // namespace ddp::backends
