#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ddp {

/// A file whose bytes are read as memory: those pages alone that are looked at.
///
/// A file that another process shortens meanwhile ends this one (SIGBUS).
class MappedFile {
 public:
  /// \throws c10::Error  with the path and the system's reason.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::string_view bytes() const { return {data_, size_}; }

 private:
  const char* data_ = nullptr;  // null: an empty file
  size_t size_ = 0;
};

}  // namespace ddp
