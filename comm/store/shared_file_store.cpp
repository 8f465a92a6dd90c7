#include "store/shared_file_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <ddp/internal/check.h>

namespace ddp {
namespace {

// With this count FileStore never removes the file itself.
constexpr int kAnyNumberOfWorkers = -1;

std::string users_of(const std::string& path) { return path + ".users"; }

Fd open_or_create(const std::string& path) {
  Fd file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  DDP_CHECK(file, path, ": ", std::strerror(errno));
  return file;
}

bool is_at(int fd, const std::string& path) {
  struct stat opened = {};
  struct stat named = {};
  return ::fstat(fd, &opened) == 0 && ::stat(path.c_str(), &named) == 0 &&
         opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

Fd lock_shared(const std::string& path) {
  for (;;) {
    auto file = open_or_create(path);
    const bool locked = TEMP_FAILURE_RETRY(::flock(file.get(), LOCK_SH)) == 0;
    DDP_CHECK(locked, "locking ", path, ": ", std::strerror(errno));
    // Otherwise its last user has removed the file after it was opened.
    if (is_at(file.get(), path)) return file;
  }
}

}  // namespace

FileUse::FileUse(const std::string& path) : path_(path), users_(lock_shared(users_of(path))) {
  open_or_create(path);  // FileStore waits minutes for a file that it cannot create
}

FileUse::~FileUse() {
  if (::flock(users_.get(), LOCK_EX | LOCK_NB) == 0) {
    ::unlink(path_.c_str());
    ::unlink(users_of(path_).c_str());
  }
  ::flock(users_.get(), LOCK_UN);  // because a process that this one forked may hold the descriptor
}

SharedFileStore::SharedFileStore(const std::string& path)
    : FileUse(path), FileStore(path, kAnyNumberOfWorkers) {}

c10::intrusive_ptr<c10d::Store> SharedFileStore::clone() {
  return c10::make_intrusive<SharedFileStore>(getPath());
}

}  // namespace ddp
