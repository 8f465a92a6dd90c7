#pragma once

#include <cstddef>
#include <string>

#include "../../registry.h"

namespace ddp::backends::shm {

/// A backend, or the reason why there is none: the same on all ranks.
struct BootstrapResult {
  BackendPtr backend;
  std::string why_not;
};

struct BootstrapOptions {
  std::string host;        // ranks with the same name share memory; empty: determined
  size_t arena_bytes = 0;  // of each rank, whole pages; 0: as much memory as the host has
};

/// Makes the backend over shared memory, if the ranks of a host can map each other's memory: a
/// ShmBackend if all ranks are on one host, else a HierarchicalBackend.
///
/// A group that is made of a group over shared memory uses the memory of that group.
///
/// \throws c10::Error  on all ranks, if an entry of the store is malformed.
///
/// Collective: yes. Blocks: host, until the deadline.
/// Cost: 3 rounds, 1 in a group that is made of a group over shared memory; one more for several
/// hosts. A round is 3 store operations per rank.
BootstrapResult bootstrap(const Setup& setup, const BootstrapOptions& options);

}  // namespace ddp::backends::shm
