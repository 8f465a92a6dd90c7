// A file in memory, to be read from its begin to its end.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace ddp {

/// The size of a file in bytes.
///
/// \throws c10::ValueError  `path` is no file that this process can read.
size_t size_of_file(const char* subject, const std::string& path);

/// A file, mapped. The kernel reads pages ahead of those that are used; writes change this
/// process's memory, and not the file.
///
/// Thread safety: all threads may read.
class FileView {
 public:
  /// \param size  of the file, as it was.
  /// \throws c10::Error  it cannot be read, or has another size now.
  FileView(const std::string& path, size_t size);
  ~FileView();
  FileView(const FileView&) = delete;
  FileView& operator=(const FileView&) = delete;

  char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  const size_t size_;
  char* data_ = nullptr;
};

/// Bytes that something else keeps in memory.
struct Bytes {
  char* data = nullptr;
  size_t size = 0;
  std::shared_ptr<const void> owner = nullptr;
};

/// Waits until bytes of a mapping are in memory, so that a worker reads them. Only advice.
void read_pages(const Bytes& bytes);

}  // namespace ddp
