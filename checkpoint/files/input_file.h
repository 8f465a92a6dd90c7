#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <ddp/internal/system/fd.h>

namespace ddp {

/// A file of which ranges of bytes are read.
///
/// The ranges are copied and not mapped: a file that another process shortens meanwhile is an
/// error, where a mapping would end this process (SIGBUS) or show zeros.
///
/// All members throw c10::Error with the path and the reason.
class InputFile {
 public:
  explicit InputFile(std::string path);

  /// The file's bytes when it was opened.
  uint64_t size() const { return size_; }

  /// Reads `bytes` bytes, beginning with the byte `at`.
  void read(uint64_t at, void* to, size_t bytes) const;

 private:
  std::string path_;
  Fd file_;
  uint64_t size_ = 0;
};

}  // namespace ddp
