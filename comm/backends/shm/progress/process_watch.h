#pragma once

#include <sys/types.h>

#include <ddp/internal/system/fd.h>

namespace ddp::backends::shm {

/// Detects the end of another process, by a pidfd.
class ProcessWatch {
 public:
  /// Watches nothing if `pid` is this process.
  ///
  /// \throws c10::Error  if there is no such process, or the kernel does not allow watching it:
  ///         before Linux 5.3, or in some containers.
  explicit ProcessWatch(pid_t pid);

  pid_t pid() const { return pid_; }
  bool has_ended() const;

 private:
  pid_t pid_;
  Fd process_;  // readable once it has ended
};

}  // namespace ddp::backends::shm
