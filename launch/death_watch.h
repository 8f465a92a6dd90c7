#pragma once

#include <vector>

#include <sys/types.h>

#include "launch/fd.h"

namespace ddp::launch {

/// Reports children in the order in which they died; waitpid reports them by age.
///
/// When one rank fails, its peers lose their connections to it and fail a moment later. A
/// busy launcher finds them all dead at once, and has to name the first.
class DeathWatch {
 public:
  DeathWatch();

  /// Starts to watch a child. Where the kernel lacks pidfds (before Linux 5.3) nothing happens.
  void watch(pid_t pid);

  /// Returns those of the watched children that died since the last call, first death first, and
  /// watches them no more. They remain to be reaped.
  std::vector<pid_t> died();

  /// Whether `died()` will return this child.
  bool watches(pid_t pid) const;

  /// Readable, as poll sees it, while `died()` has a child to return.
  int fd() const { return epoll_.get(); }

 private:
  struct Watched {
    pid_t pid;
    Fd pidfd;
  };
  Fd epoll_;
  std::vector<Watched> watched_;
};

}  // namespace ddp::launch
