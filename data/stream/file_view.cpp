#include "stream/file_view.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include <ddp/internal/check.h>
#include <ddp/internal/system/fd.h>

namespace ddp {
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
  // Reads ahead by large folios, as read() does; MADV_WILLNEED does by single pages, which took
  // twice the time. Only advice.
  ::madvise(data_, size, MADV_SEQUENTIAL);
}

FileView::~FileView() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

void read_pages(const Bytes& bytes) {
#ifdef MADV_POPULATE_READ
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto before = reinterpret_cast<uintptr_t>(bytes.data) % page;
  ::madvise(bytes.data - before, bytes.size + before, MADV_POPULATE_READ);
#endif
}

}  // namespace ddp
