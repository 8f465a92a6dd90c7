#pragma once

#include <string>

#include "../../setup.h"

namespace ddp::backends::shm {

/// A backend, or why there is none: the same on all ranks.
struct BootstrapResult {
  BackendPtr backend;
  std::string why_not;
};

/// Makes the backend over shared memory, if the ranks of a host can map each other's memory: a
/// ShmBackend where all ranks are on one host, else a HierarchicalBackend.
///
/// \param gloo  for the collectives that shared memory does not carry.
/// \param host  the ranks that give the same name share memory; empty: the library finds the name.
///
/// Collective: yes. Blocks: host, until the deadline.
BootstrapResult bootstrap(const Setup& setup, const BackendPtr& gloo, const std::string& host = "");

}  // namespace ddp::backends::shm
