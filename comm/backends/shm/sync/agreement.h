#pragma once

#include <cstdint>
#include <string>

namespace ddp::backends::shm {

/// What the ranks' memory says of a collective, where their descriptors do not say all of it. The
/// same on all ranks.
struct Agreement {
  std::string mismatch;  // what differs between the ranks' calls; empty: nothing
  uint64_t rounds = 1;   // how often each rank does its reduce step
};

}  // namespace ddp::backends::shm
