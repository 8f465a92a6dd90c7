#include "data_file.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

namespace examples {
namespace {

// POSIX, not std::filesystem: LibTorch's libraries export an older copy of its functions, which a
// program that links them gets instead of its own and crashes in.
int stat_file(const std::string& path, struct stat& info) {
  if (stat(path.c_str(), &info) != 0) return errno;
  return S_ISDIR(info.st_mode) ? EISDIR : 0;
}

}  // namespace

bool is_file(const std::string& path) {
  struct stat info {};
  return stat_file(path, info) == 0;
}

DataFile::DataFile(const std::string& path, const std::string& kind, const std::string& remedy)
    : path_(path) {
  struct stat info {};
  int error = stat_file(path, info);
  if (error == 0) {
    size_ = static_cast<uint64_t>(info.st_size);
    stream_.open(path, std::ios::binary);
    if (!stream_) error = errno;
  }
  TORCH_CHECK_VALUE(
      error == 0, path, ": expected ", kind, ", found none (", std::strerror(error), "). ", remedy);
}

void DataFile::read(void* bytes, size_t size) {
  stream_.read(static_cast<char*>(bytes), static_cast<std::streamsize>(size));
  const auto found = static_cast<size_t>(stream_.gcount());
  TORCH_CHECK_VALUE(
      found == size, path_, ": expected to read ", size, " bytes, found ", found,
      ". Is another program writing it?");
}

at::Tensor DataFile::read_tensor(at::IntArrayRef sizes) {
  at::Tensor bytes = at::empty(sizes, at::kByte);
  read(bytes.mutable_data_ptr(), bytes.nbytes());
  return bytes;
}

void check_labels(
    const at::Tensor& labels, int64_t classes, const std::string& path, const std::string& kind,
    const std::string& remedy) {
  const at::Tensor dense = labels.contiguous();
  const int64_t* values = dense.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < dense.numel(); ++i) {
    TORCH_CHECK_VALUE(
        values[i] >= 0 && values[i] < classes, path, ": expected ", kind, " from 0 to ",
        classes - 1, ", found ", values[i], " at position ", i, ".", remedy);
  }
}

}  // namespace examples
