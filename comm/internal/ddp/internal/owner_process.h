#pragma once

#include <unistd.h>

namespace ddp {

/// The process that made an object.
///
/// A process that a rank forks has a copy of the rank's objects, but not the rank's threads. The
/// destructors of these copies (which wait for threads, and write to memory and sockets that the
/// rank uses too) would harm the rank or never return. So an object that owns any of these checks
/// this first, and leaks them in a process that did not make it.
class OwnerProcess {
 public:
  bool is_this_one() const { return pid_ == ::getpid(); }

 private:
  pid_t pid_ = ::getpid();
};

}  // namespace ddp
