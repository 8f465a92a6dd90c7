#include "files/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include <ddp/internal/check.h>
#include <ddp/internal/fd.h>

namespace ddp {
namespace {

void check_mapped(bool succeeded, const std::string& path) {
  DDP_CHECK(
      succeeded, path, ": expected to read it, got \"", std::strerror(errno),
      "\". Check the path, and whether this process may read it.");
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const Fd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  check_mapped(bool(file), path);
  struct stat info {};
  check_mapped(fstat(file.get(), &info) == 0, path);
  DDP_CHECK(S_ISREG(info.st_mode), path, ": expected a file, got another thing. Name a file.");
  size_ = static_cast<size_t>(info.st_size);
  if (size_ == 0) return;
  void* data = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.get(), 0);
  check_mapped(data != MAP_FAILED, path);
  data_ = static_cast<const char*>(data);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<char*>(data_), size_);
}

}  // namespace ddp
