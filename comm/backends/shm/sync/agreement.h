#pragma once

#include <cstdint>
#include <string>

namespace ddp::backends::shm {

/// The result of comparing the ranks' memory for a collective that descriptors do not describe
/// completely. The same on all ranks.
struct Agreement {
  std::string mismatch;  // how the ranks' calls differ; empty: they do not
  uint64_t rounds = 1;   // how often each rank runs its reduce step
};

}  // namespace ddp::backends::shm
