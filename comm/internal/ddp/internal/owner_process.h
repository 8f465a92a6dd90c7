#pragma once

#include <unistd.h>

#include <ddp/internal/check.h>

namespace ddp {

/// The process that made an object.
///
/// A process that a rank forks has a copy of the rank's objects, but not the rank's threads. The
/// destructors of these copies (which wait for threads, and write to memory and sockets that the
/// rank uses too) would harm the rank or never return. So an object that owns any of these checks
/// this first, and leaks them in a process that did not make it. Its calls are errors there.
class OwnerProcess {
 public:
  bool is_this_one() const { return pid_ == ::getpid(); }

  /// For calls that would take the rank's place.
  ///
  /// \throws c10::Error  in another process.
  void check(const char* subject) const {
    DDP_CHECK(
        is_this_one(), subject, ": expected a call in process ", pid_,
        ", which made the group, got one in process ", ::getpid(),
        ", which it forked. Make it before the fork, or in the process that forks.");
  }

 private:
  pid_t pid_ = ::getpid();
};

}  // namespace ddp
