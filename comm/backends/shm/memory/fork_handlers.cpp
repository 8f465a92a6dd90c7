#include "fork_handlers.h"

#include <pthread.h>

#include <cstring>

#include <ddp/internal/check.h>

namespace ddp::backends::shm {

void add_fork_handlers(void (*before)(), void (*in_parent)(), void (*in_child)()) {
  const int error = ::pthread_atfork(before, in_parent, in_child);
  DDP_CHECK(error == 0, "expected to be told of forks, but ", std::strerror(error));
}

}  // namespace ddp::backends::shm
