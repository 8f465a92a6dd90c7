// A file in a process's memory, for what need not fit into the machine's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <ddp/internal/system/fd.h>

namespace ddp {

/// Bytes of a file.
struct FileSpan {
  size_t offset = 0;
  size_t bytes = 0;
  size_t end() const { return offset + bytes; }
};

/// A file without a name, whose memory is the file: the kernel reads pages that are used, and may
/// write the others to the disk and take their memory. Nothing is left of it when the process ends,
/// also when it is killed.
///
/// Thread safety: none.
class MappedFile : public std::enable_shared_from_this<MappedFile> {
 public:
  /// \param path  the file is made in its folder, under this name and six letters for a moment.
  /// \throws c10::Error  the file cannot be made, or the disk has not all of its bytes.
  static std::shared_ptr<MappedFile> make(const std::string& path, size_t bytes);
  ~MappedFile();
  C10_DISABLE_COPY_AND_ASSIGN(MappedFile);

  /// A 1-D tensor in the file's memory, with a storage of its own, which keeps the file.
  at::Tensor tensor(size_t offset, int64_t numel, at::ScalarType type);

  /// Begins to read pages that are not in memory; the span may end after the file.
  void prefetch(const FileSpan& span) const noexcept;
  /// Begins to write the pages that have changed.
  ///
  /// \throws c10::Error  the disk does not take them.
  void start_writing(const FileSpan& span) const;
  /// Waits until the disk has what start_writing() began to write, and gives the memory back.
  ///
  /// \throws c10::Error  the disk does not take it.
  void finish_writing(const FileSpan& span) const;

 private:
  MappedFile(std::string path, size_t bytes);
  void write(const FileSpan& span, unsigned flags) const;

  const std::string path_;  // as given, for errors
  const size_t bytes_;
  Fd fd_;
  std::byte* data_ = nullptr;
};

}  // namespace ddp
