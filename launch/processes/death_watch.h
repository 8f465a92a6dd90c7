#pragma once

#include <vector>

#include <sys/types.h>

#include "launch/pipe.h"

namespace ddp::launch {

/// Reports children in the order in which they died; waitpid reports them by age.
///
/// When one rank fails, its peers lose their connections to it and fail a moment later. A busy
/// launcher finds all of them dead at once, and has to report the rank that failed first.
class DeathWatch {
 public:
  DeathWatch();

  /// Starts to watch a child. Does nothing where the kernel lacks pidfds (before Linux 5.3).
  void watch(pid_t pid);

  /// Returns the watched children that died since the last call, first death first, and stops
  /// watching them. They still have to be reaped.
  std::vector<pid_t> died();

  /// Whether `died()` will return this child.
  bool watches(pid_t pid) const;

  /// The descriptor that polls as readable while `died()` has a child to return.
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
