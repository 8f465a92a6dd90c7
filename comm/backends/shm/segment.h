#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>

namespace ddp::backends::shm {

/// Memory that several processes map. It has no name in any file system, and is gone when the last
/// process that maps it is, however that one ends.
class Segment {
 public:
  /// Makes one of `bytes` zeros, of which only touched pages take memory.
  ///
  /// \throws c10::Error  when the system refuses, with its reason.
  static std::shared_ptr<Segment> make(size_t bytes);

  /// Maps the one that a process of this host made; `pid` and `fd` are that process's.
  ///
  /// \throws c10::Error  when there is none or this process may not.
  static std::shared_ptr<Segment> open(pid_t pid, int fd, size_t bytes);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  /// Of one that was made here; -1 else.
  int fd() const { return fd_; }

  /// Gives the memory of whole pages in [offset, offset + bytes) back, for all that map it; they
  /// read as zeros. For one that was made here.
  void discard(size_t offset, size_t bytes);

 private:
  Segment(int fd, size_t bytes, bool owns);

  int fd_;
  size_t bytes_;
  std::byte* data_;
};

}  // namespace ddp::backends::shm
