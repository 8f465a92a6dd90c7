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
#ifdef SYS_pidfd_open
  descriptor_ = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
#else
  errno = ENOSYS;
#endif
  DDP_CHECK(
      descriptor_ >= 0, "expected to watch process ", pid,
      " with pidfd_open, but could not: ", std::strerror(errno));
}

ProcessWatch::~ProcessWatch() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

bool ProcessWatch::has_ended() const {
  pollfd event{descriptor_, POLLIN, 0};
  return descriptor_ >= 0 && ::poll(&event, 1, 0) == 1;
}

}  // namespace ddp::backends::shm
