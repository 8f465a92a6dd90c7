#include "process_watch.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ddp::backends::shm {

ProcessWatch::ProcessWatch(pid_t pid) : pid_(pid) {
#ifdef SYS_pidfd_open
  if (pid != ::getpid()) descriptor_ = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
#endif
}

ProcessWatch::~ProcessWatch() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

bool ProcessWatch::has_ended() const {
  pollfd event{descriptor_, POLLIN, 0};
  return descriptor_ >= 0 && ::poll(&event, 1, 0) == 1;
}

}  // namespace ddp::backends::shm
