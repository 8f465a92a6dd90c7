#include "stream/file_view.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <ddp/internal/check.h>
#include <ddp/internal/system/fd.h>

namespace ddp {
namespace {

// Enough for a fast disk to be busy while samples are made of what was read before.
constexpr size_t kAhead = size_t{32} << 20;
constexpr size_t kChunk = size_t{4} << 20;  // a multiple of all sizes of pages

}  // namespace

size_t size_of_file(const char* subject, const std::string& path) {
  struct stat info {};
  const int error = ::stat(path.c_str(), &info) == 0 ? 0 : errno;
  const bool is_readable = error == 0 && ::access(path.c_str(), R_OK) == 0;
  const char* fault = error != 0 ? std::strerror(error) : "a file that this user may not read";
  if (error == 0 && !S_ISREG(info.st_mode)) fault = "a folder, a pipe or another thing";
  DDP_CHECK_VALUE(
      is_readable && S_ISREG(info.st_mode), subject, ": expected the path of a file, got \"", path,
      "\": ", fault, ". Name files that every rank can read.");
  return static_cast<size_t>(info.st_size);
}

FileView::FileView(const std::string& path, size_t size) : size_(size) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  DDP_CHECK(
      fd, "ShardedStream: expected to read \"", path, "\", got: ", std::strerror(errno),
      ". Put the file back, and call next() again.");
  struct stat info {};
  DDP_CHECK(
      ::fstat(fd.get(), &info) == 0 && static_cast<size_t>(info.st_size) == size,
      "ShardedStream: expected \"", path, "\" to have ", size,
      " bytes, as when the source was made, got ", info.st_size,
      ". Write files to the end before, and do not change them.");
  if (size == 0) return;
  void* data =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd.get(), 0);
  DDP_CHECK(
      data != MAP_FAILED, "ShardedStream: expected to map \"", path,
      "\", got: ", std::strerror(errno), ". Raise `ulimit -v`.");
  data_ = static_cast<char*>(data);
}

FileView::~FileView() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

void FileView::read_ahead(size_t offset) {
  if (asked_ < offset) asked_ = offset / kChunk * kChunk;
  while (asked_ < size_ && asked_ < offset + kAhead) {
    const auto bytes = std::min(kChunk, size_ - asked_);
    ::madvise(data_ + asked_, bytes, MADV_WILLNEED);  // only advice
    asked_ += bytes;
  }
}

}  // namespace ddp
