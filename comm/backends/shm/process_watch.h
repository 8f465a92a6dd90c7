#pragma once

#include <sys/types.h>

namespace ddp::backends::shm {

/// Tells when another process has ended.
class ProcessWatch {
 public:
  /// Watches nothing where `pid` is this process.
  ///
  /// \throws c10::Error  where there is none, or the system does not let it be watched: before
  ///         Linux 5.3, or in some containers.
  explicit ProcessWatch(pid_t pid);
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  pid_t pid() const { return pid_; }
  bool has_ended() const;

 private:
  pid_t pid_;
  int descriptor_ = -1;  // readable once it has ended
};

}  // namespace ddp::backends::shm
