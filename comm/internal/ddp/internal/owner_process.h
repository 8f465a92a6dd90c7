#pragma once

#include <unistd.h>

namespace ddp {

/// The process that made an object.
///
/// A process that a rank forks has a copy of the rank's objects, without the rank's threads. What
/// the copies would do in their destructors (wait for threads, write to memory and sockets that the
/// rank uses too) harms the rank or never returns. So an object that owns any of these asks first,
/// and leaks what it owns in a process that did not make it.
class OwnerProcess {
 public:
  bool is_this_one() const { return pid_ == ::getpid(); }

 private:
  pid_t pid_ = ::getpid();
};

}  // namespace ddp
