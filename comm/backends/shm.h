#pragma once

#include <string>

#include "setup.h"

namespace ddp::backends {

/// A backend, or why there is none: the same on all ranks.
struct Shared {
  BackendPtr backend;
  std::string why_not;
};

/// Maps the memory of a host's ranks into each other, if there are any such and they may; over
/// several hosts, their first ranks do the rest.
///
/// \param gloo  for what shared memory is not made for.
/// \param host  ranks with the same share memory; empty: found out.
///
/// Collective: yes. Blocks: host, until the deadline.
Shared make_shm(const Setup& setup, const BackendPtr& gloo, const std::string& host = "");

}  // namespace ddp::backends
