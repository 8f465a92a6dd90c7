// What tests of the wrapper share.
#pragma once

#include <chrono>

#include <ddp/distributed_data_parallel.h>

#include "support/error_of.h"
#include "support/ranks.h"

namespace ddp::testing {

/// Options for a wrapper over a rank-thread's own group.
inline DistributedDataParallelOptions in(const Rank& self) {
  return DistributedDataParallelOptions().process_group(self.group);
}

/// Far beyond the 5 s in which ranks have to learn of each other's errors: what tests of those see
/// is not this.
const RanksOptions kLongTimeout{std::chrono::seconds(50), std::chrono::seconds(55)};

}  // namespace ddp::testing
