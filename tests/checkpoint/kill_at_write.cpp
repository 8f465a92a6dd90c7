// A library to be preloaded into the ranks of a job: counts the calls by which a process changes
// files, and kills it at one of them. DDP_TEST_KILL_AT="RANK NUMBER" in the environment says which;
// the number 0 kills no process. A process that ends prints its count on stderr.
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace {

struct Victim {
  Victim() {
    const char* const own = std::getenv("RANK");
    const char* const asked = std::getenv("DDP_TEST_KILL_AT");
    if (own == nullptr || asked == nullptr) return;  // ddprun, for one
    rank = std::atoi(own);
    int of = -1, at = 0;
    if (std::sscanf(asked, "%d %d", &of, &at) == 2 && of == rank) number = at;
  }
  ~Victim() {
    if (rank >= 0) dprintf(STDERR_FILENO, "rank %d changed files %d times\n", rank, count.load());
  }

  int rank = -1;
  int number = 0;  // of the call that ends the process
  std::atomic<int> count{0};
};

Victim& victim() {
  static Victim one;
  return one;
}

/// Whether this call is the one.
bool is_last_call() { return ++victim().count == victim().number; }

void kill_if_last() {
  if (is_last_call()) kill(getpid(), SIGKILL);
}

}  // namespace

#define REPLACES extern "C" __attribute__((visibility("default")))

REPLACES ssize_t write(int fd, const void* data, size_t size) {
  struct stat info {};
  if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && is_last_call()) {
    syscall(SYS_write, fd, data, size / 2);
    kill(getpid(), SIGKILL);
  }
  return syscall(SYS_write, fd, data, size);
}

REPLACES int fsync(int fd) {
  kill_if_last();
  return static_cast<int>(syscall(SYS_fsync, fd));
}

REPLACES int rename(const char* from, const char* to) noexcept {
  kill_if_last();
  return static_cast<int>(syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0U));
}

REPLACES int renameat2(
    int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  kill_if_last();
  return static_cast<int>(syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
}

REPLACES int unlink(const char* path) noexcept {
  kill_if_last();
  return static_cast<int>(syscall(SYS_unlinkat, AT_FDCWD, path, 0));
}

REPLACES int rmdir(const char* path) noexcept {
  kill_if_last();
  return static_cast<int>(syscall(SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR));
}
