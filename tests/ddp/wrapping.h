// Shared helpers for tests of the wrapper.
#pragma once

#include <ddp/distributed_data_parallel.h>

#include "support/error_of.h"
#include "support/ranks.h"

namespace ddp::testing {

/// Options for a wrapper over a rank-thread's own group.
inline DistributedDataParallelOptions in(const Rank& self) {
  return DistributedDataParallelOptions().process_group(self.group);
}

}  // namespace ddp::testing
