// A backend whose messages go as NCCL's: a rank's stream in a group moves one at a time, in the
// order of the calls, and a send ends with its receive. Between ranks that are threads, in host
// memory.
#pragma once

#include <cstddef>

namespace ddp::testing {

/// Adds it, once a process. It says that its waits hold up a stream.
///
/// \return  its name.
const char* register_one_at_a_time();

/// The groups that were made over it, counted once a rank.
size_t one_at_a_time_groups();

}  // namespace ddp::testing
