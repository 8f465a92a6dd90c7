#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>

#include <ddp/internal/owner_process.h>

namespace ddp::backends::shm {

/// Registers handlers for every later fork of this process: `before` runs first, then `in_parent`
/// and `in_child`; also after the library's static objects were destroyed.
///
/// \throws c10::Error  if the system has no memory for the registration.
void add_fork_handlers(void (*before)(), void (*in_parent)(), void (*in_child)());

/// The size of a page: 4 KiB on x86-64, 4, 16 or 64 KiB on aarch64.
size_t page_bytes();

/// Memory that several processes map: a memfd. It has no name in any file system. The kernel frees
/// it when the last process that maps it has ended, however that process ends.
///
/// A process that the maker forks gets a private mapping: its reads may still see the maker's
/// writes until it writes itself; no other process sees its own writes.
class Segment {
 public:
  /// Makes a segment of `bytes` zeros. Only pages that a process touches take memory.
  ///
  /// \throws c10::Error  with the reason, if the kernel refuses.
  static std::shared_ptr<Segment> make(size_t bytes);

  /// Maps the segment of `bytes` that process `pid` of this host made and has open as `fd`. Accepts
  /// only a memfd of this user, of exactly that size, whose size is sealed: so no access to it ends
  /// this process by a signal.
  ///
  /// \throws c10::Error  if there is no such memfd, or this process may not open it.
  static std::shared_ptr<Segment> open(pid_t pid, int fd, size_t bytes);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  /// The descriptor of a segment that this process made; -1 for one that it opened.
  int fd() const { return fd_; }

  /// Frees the memory of the whole pages in [offset, offset + bytes) for all processes that map
  /// them. The pages read as zeros afterwards. Only for a segment that this process made; in a
  /// process that it forked it does nothing.
  void discard(size_t offset, size_t bytes);

 private:
  class ForkRegistry;

  Segment(int fd, size_t bytes, bool owns);
  void remap_private() const;

  const OwnerProcess owner_;
  int fd_;
  size_t bytes_;
  std::byte* data_;
};

}  // namespace ddp::backends::shm
