#include "process_watch.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <ddp/internal/check.h>

namespace ddp::backends::shm {

ProcessWatch::ProcessWatch(pid_t pid) : pid_(pid) {
  if (pid == ::getpid()) return;
  process_ = Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  DDP_CHECK(
      process_, "expected to watch process ", pid,
      " with pidfd_open, but could not: ", std::strerror(errno));
}

bool ProcessWatch::has_ended() const {
  pollfd event{process_.get(), POLLIN, 0};
  return process_ && ::poll(&event, 1, 0) == 1;
}

}  // namespace ddp::backends::shm
