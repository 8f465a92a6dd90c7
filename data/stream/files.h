// Sources whose records are in files that are read on their own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ddp/detail/stream_source.h>

#include "stream/file_view.h"

namespace ddp {

/// Reads the records of one file.
class RecordFile {
 public:
  virtual ~RecordFile() = default;
  /// \return an empty function after the last record.
  virtual detail::StreamLoad next() = 0;
  /// Where the next record begins: the size of the file, or more, after the last one.
  virtual int64_t offset() const = 0;
};

class FilesSource : public detail::StreamSourceBase {
 public:
  /// \param kind  the function that users call.
  FilesSource(const char* kind, std::vector<std::string> paths);

  std::unique_ptr<detail::StreamReader> read(
      const std::vector<size_t>& order, const detail::StreamMark& from) const override;
  size_t files() const override { return paths_.size(); }
  std::string place(size_t file, const detail::StreamMark& mark) const override;
  std::vector<Field> fields() const override;

 protected:
  /// Begins to read a file at a record's offset.
  virtual std::unique_ptr<RecordFile> open(
      const std::string& path, std::shared_ptr<FileView> view, int64_t offset) const = 0;

  const std::vector<std::string>& paths() const { return paths_; }
  const std::vector<size_t>& sizes() const { return sizes_; }

 private:
  class Reader;

  const char* const kind_;
  const std::vector<std::string> paths_;
  std::vector<size_t> sizes_;
};

}  // namespace ddp
