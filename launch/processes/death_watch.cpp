#include "launch/processes/death_watch.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <system_error>

#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ddp::launch {

DeathWatch::DeathWatch() : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) throw std::system_error(errno, std::generic_category(), "cannot watch processes");
}

void DeathWatch::watch(pid_t pid) {
  Fd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));  // always close-on-exec
  if (!pidfd) return;
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = static_cast<uint64_t>(pid);
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, pidfd.get(), &event) != 0) return;
  watched_.push_back({pid, std::move(pidfd)});
}

std::vector<pid_t> DeathWatch::died() {
  // epoll keeps its ready list in the order of the kernel's wake-ups, and so in the order of
  // deaths.
  std::array<epoll_event, 64> events;
  std::vector<pid_t> result;
  for (;;) {
    const int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), 0);
    if (count <= 0) return result;
    for (int i = 0; i < count; ++i) {
      const auto pid = static_cast<pid_t>(events[i].data.u64);
      result.push_back(pid);
      const auto watched = std::find_if(
          watched_.begin(), watched_.end(), [pid](const Watched& w) { return w.pid == pid; });
      watched_.erase(watched);  // closing the pidfd removes it from the epoll set
    }
  }
}

bool DeathWatch::watches(pid_t pid) const {
  return std::any_of(
      watched_.begin(), watched_.end(), [pid](const Watched& w) { return w.pid == pid; });
}

}  // namespace ddp::launch
