#include "files/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <ddp/internal/check.h>

namespace ddp {
namespace {

constexpr size_t kMostAtOnce = size_t{1} << 30;  // read() takes no more than 2 GiB

void check_readable(bool succeeded, const std::string& path) {
  DDP_CHECK(
      succeeded, path, ": expected to read it, got \"", std::strerror(errno),
      "\". Check the path, and whether this process may read it.");
}

}  // namespace

InputFile::InputFile(std::string path)
    : path_(std::move(path)), file_(open(path_.c_str(), O_RDONLY | O_CLOEXEC)) {
  check_readable(bool(file_), path_);
  struct stat info {};
  check_readable(fstat(file_.get(), &info) == 0, path_);
  DDP_CHECK(S_ISREG(info.st_mode), path_, ": expected a file, got another thing. Name a file.");
  size_ = static_cast<uint64_t>(info.st_size);
}

void InputFile::read(uint64_t at, void* to, size_t bytes) const {
  auto* next = static_cast<char*>(to);
  for (size_t done = 0; done < bytes;) {
    const ssize_t count = TEMP_FAILURE_RETRY(pread(
        file_.get(), next + done, std::min(bytes - done, kMostAtOnce),
        static_cast<off_t>(at + done)));
    check_readable(count >= 0, path_);
    DDP_CHECK(
        count > 0, path_, ": expected ", bytes, " bytes at byte ", at, ", got ", done,
        ", because another process shortened the file. Copy it again, and load it after that.");
    done += static_cast<size_t>(count);
  }
}

}  // namespace ddp
