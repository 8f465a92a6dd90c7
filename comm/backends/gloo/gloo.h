#pragma once

#include "backends/registry.h"

namespace ddp::backends {

/// Connects all pairs of ranks before it returns.
///
/// \throws c10::Error  naming the devices, if this rank cannot connect.
///
/// Collective: yes. Blocks: host, until the deadline.
BackendPtr make_gloo(const Setup& setup);

}  // namespace ddp::backends
