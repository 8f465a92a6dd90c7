#include "segment.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_set>

#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

namespace ddp::backends::shm {
namespace {

// Processes that have the file cannot change its size, so no access to a mapping raises SIGBUS.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

// Returns why the open file is not a segment of this user with that size; empty if it is one.
std::string why_not_a_segment(int fd, size_t bytes) {
  struct stat file {};
  if (::fstat(fd, &file) != 0) return std::strerror(errno);
  if (file.st_uid != ::geteuid()) {
    return ddp::str("it is user ", file.st_uid, "'s, not user ", ::geteuid(), "'s");
  }
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) return "it is no memfd of a sealed size";
  if (static_cast<size_t>(file.st_size) != bytes) {
    return ddp::str("it has ", file.st_size, " bytes, not ", bytes);
  }
  return "";
}

}  // namespace

void add_fork_handlers(void (*before)(), void (*in_parent)(), void (*in_child)()) {
  const int error = ::pthread_atfork(before, in_parent, in_child);
  DDP_CHECK(error == 0, "expected to be told of forks, but ", std::strerror(error));
}

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

/// The segments that this process made. A process that it forks gets private copies of them: its
/// writes to a tensor must not reach the parent, as with any other memory.
class Segment::ForkRegistry {
 public:
  static void add(Segment* segment) {
    static std::once_flag registered;
    std::call_once(registered, register_fork_handlers);
    const std::lock_guard lock(mutex());
    made().insert(segment);
  }
  static void remove(Segment* segment) {
    const std::lock_guard lock(mutex());
    made().erase(segment);
  }

 private:
  static void register_fork_handlers() {
    add_fork_handlers(
        [] { mutex().lock(); }, [] { mutex().unlock(); },
        [] {
          for (const auto* s : made()) s->remap_private();
          mutex().unlock();
        });
  }
  // Never destroyed: a process may fork, and a tensor be destroyed, while it exits.
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::unordered_set<Segment*>& made() {
    static auto* made = new std::unordered_set<Segment*>;
    return *made;
  }
};

Segment::Segment(int fd, size_t bytes, bool owns) : fd_(fd), bytes_(bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    ::close(fd);
    DDP_CHECK(
        false, "expected to map ", bytes, " bytes of shared memory, but ", std::strerror(error));
  }
  data_ = static_cast<std::byte*>(data);
  // Otherwise a core file would contain the memory of all ranks.
  ::madvise(data_, bytes, MADV_DONTDUMP);
  if (owns) return;
  ::close(fd);  // the mapping does not need it
  fd_ = -1;
}

void Segment::remap_private() const {
  constexpr int kHow = MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED;
  // If it fails, the child continues with shared memory.
  (void)::mmap(data_, bytes_, PROT_READ | PROT_WRITE, kHow, fd_, 0);
}

Segment::~Segment() {
  ForkRegistry::remove(this);
  ::munmap(data_, bytes_);
  if (fd_ >= 0) ::close(fd_);
}

std::shared_ptr<Segment> Segment::make(size_t bytes) {
  // Beyond this limit the kernel ends the process with SIGXFSZ in ftruncate.
  rlimit largest{};
  DDP_CHECK(
      ::getrlimit(RLIMIT_FSIZE, &largest) != 0 || bytes <= largest.rlim_cur,
      "expected to make shared memory of ", bytes, " bytes, but `ulimit -f` allows ",
      largest.rlim_cur);
  const int fd = ::memfd_create("ddp", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  DDP_CHECK(fd >= 0, "expected to make shared memory, but ", std::strerror(errno));
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0 ||
      ::fcntl(fd, F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0) {
    const int error = errno;
    ::close(fd);
    DDP_CHECK(
        false, "expected to make shared memory of ", bytes, " bytes, but ", std::strerror(error));
  }
  std::shared_ptr<Segment> segment(new Segment(fd, bytes, /*owns=*/true));
  ForkRegistry::add(segment.get());
  return segment;
}

std::shared_ptr<Segment> Segment::open(pid_t pid, int fd, size_t bytes) {
  const auto path = ddp::str("/proc/", pid, "/fd/", fd);
  // Opened without waiting, because the descriptor's number may belong to a pipe by now.
  const int own = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
  DDP_CHECK(
      own >= 0, "expected to open the memory of process ", pid, " at ", path, ", but ",
      std::strerror(errno));
  const auto problem = why_not_a_segment(own, bytes);
  if (!problem.empty()) {
    ::close(own);
    DDP_CHECK(false, "expected the memory of process ", pid, " at ", path, ", but ", problem);
  }
  return std::shared_ptr<Segment>(new Segment(own, bytes, /*owns=*/false));
}

void Segment::discard(size_t offset, size_t bytes) {
  if (!owner_.is_this_one()) return;
  // A failure only costs memory.
  (void)::fallocate(
      fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
      static_cast<off_t>(bytes));
}

}  // namespace ddp::backends::shm
