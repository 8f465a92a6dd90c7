#include "zero/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <ATen/ops/from_blob.h>
#include <ddp/internal/check.h>

namespace ddp {
namespace {

constexpr const char* kRoomRemedy =
    ". Give offload_file() a path in a folder of a local disk with that much room, which this user "
    "may write to; the file is made beside it.";

size_t page_size() {
  static const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

bool is_folder(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

void check(bool is_right, const std::string& path, size_t bytes, const char* why) {
  DDP_CHECK(
      is_right, "ZeroRedundancyOptimizer: expected to make a file of ", bytes,
      " bytes for the optimizer's state at \"", path, "\", got: ", why, kRoomRemedy);
}

// Returns the file, of which only the descriptor is left. Two ranks may give the same path.
Fd make_file(const std::string& path, size_t bytes) {
  check(!is_folder(path), path, bytes, "that is a folder, not the path of a file");
  auto name = path + ".XXXXXX";
  Fd fd(::mkostemp(name.data(), O_CLOEXEC));
  check(static_cast<bool>(fd), path, bytes, std::strerror(errno));
  ::unlink(name.c_str());
  // Beyond this limit the kernel ends the process with SIGXFSZ.
  rlimit largest{};
  check(
      ::getrlimit(RLIMIT_FSIZE, &largest) != 0 || bytes <= largest.rlim_cur, path, bytes,
      "`ulimit -f` allows less");
  // A page without a block on the disk would raise SIGBUS once the disk is full.
  const int error = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes));
  check(error == 0, path, bytes, std::strerror(error));
  return fd;
}

}  // namespace

MappedFile::MappedFile(std::string path, size_t bytes)
    : path_(std::move(path)), bytes_(bytes), fd_(make_file(path_, bytes)) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  check(data != MAP_FAILED, path_, bytes, std::strerror(errno));
  data_ = static_cast<std::byte*>(data);
  ::madvise(data_, bytes, MADV_DONTDUMP);
}

MappedFile::~MappedFile() { ::munmap(data_, bytes_); }

std::shared_ptr<MappedFile> MappedFile::make(const std::string& path, size_t bytes) {
  return std::shared_ptr<MappedFile>(new MappedFile(path, bytes));
}

at::Tensor MappedFile::tensor(size_t offset, int64_t numel, at::ScalarType type) {
  return at::from_blob(
      data_ + offset, {numel}, [file = shared_from_this()](void*) {}, at::dtype(type));
}

void MappedFile::prefetch(const FileSpan& span) const noexcept {
  const auto from = span.offset / page_size() * page_size();
  ::madvise(data_ + from, std::min(span.end(), bytes_) - from, MADV_WILLNEED);  // only advice
}

void MappedFile::start_writing(const FileSpan& span) const { write(span, SYNC_FILE_RANGE_WRITE); }

void MappedFile::finish_writing(const FileSpan& span) const {
  write(span, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
  // The next use comes after that of the whole file. Pages that the kernel has to look for when the
  // memory is full cost more than these, and more than reading them again.
  const auto from = span.offset / page_size() * page_size();
  const auto to = span.end() / page_size() * page_size();
  if (to <= from) return;
  ::madvise(data_ + from, to - from, MADV_DONTNEED);
  (void)::posix_fadvise(
      fd_.get(), static_cast<off_t>(from), static_cast<off_t>(to - from), POSIX_FADV_DONTNEED);
}

// A file system that cannot write a part ahead writes it when it likes.
void MappedFile::write(const FileSpan& span, unsigned flags) const {
  const auto offset = static_cast<off_t>(span.offset);
  const int result = ::sync_file_range(fd_.get(), offset, static_cast<off_t>(span.bytes), flags);
  const int error = result == 0 ? 0 : errno;
  DDP_CHECK(
      error != EIO && error != ENOSPC && error != EDQUOT,
      "ZeroRedundancyOptimizer: expected the disk to take the optimizer's state of \"", path_,
      "\", got: ", std::strerror(error),
      ". The state is damaged: go on from a checkpoint, with a path on another disk.");
}

}  // namespace ddp
